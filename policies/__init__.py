"""Every policy by the name used in serve_config.yaml. A policy of another package is named there as
`module:function`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from arbiter.core.settings import DEFAULTS, Settings
from arbiter.core.types import Level
from arbiter.core.view import (
    Candidate,
    IdleModel,
    Key,
    MemoryReading,
    PlacementOption,
    Policies,
    Price,
    QueuedRequest,
)
from arbiter.units import Instant
from policies import (
    admit_fair_share,
    admit_fifo,
    admit_warm_first,
    evict_belady,
    evict_cost_aware,
    evict_learned,
    evict_priority_lru,
    evict_size_aware_lru,
    evict_time_of_day,
    keep_warm,
    place_best_fit,
    pressure,
)
from policies.roles import ROLES

EVICT: dict[str, Callable[[Candidate], Price]] = {
    "priority_lru": evict_priority_lru.price,
    "size_aware_lru": evict_size_aware_lru.price,
    "cost_aware": evict_cost_aware.price,
    "time_of_day": evict_time_of_day.price,
    "learned": evict_learned.price,
    "belady": evict_belady.price,
}
REPLAY_ONLY = frozenset({"belady"})  # they read the future; no configuration may name them
ADMIT: dict[str, Callable[[QueuedRequest], Key]] = {
    "fair_share": admit_fair_share.key,
    "warm_first": admit_warm_first.key,
    "fifo": admit_fifo.key,
}
PLACE: dict[str, Callable[[PlacementOption], Key]] = {"best_fit": place_best_fit.key}
KEEP_WARM: dict[str, Callable[[IdleModel], Instant | None]] = {"since_last_use": keep_warm.goes_at}

PRESSURE: dict[str, Callable[[MemoryReading], Level]] = {"physical": pressure.level}


def bundle(
    settings: Settings = DEFAULTS, outside: Mapping[str, Callable[..., Any]] | None = None
) -> Policies:
    """Returns the policies that the settings name. `outside`: functions of other packages by their
    names, as deployments.config.outside_policies imports them. Raises KeyError for a name that is
    neither here nor there."""
    return Policies(
        evict={**EVICT, **(outside or {})}[settings.evict],
        admit={**ADMIT, **(outside or {})}[settings.admit],
        place=PLACE[settings.place],
        keep_warm=KEEP_WARM[settings.keep_warm],
        roles=ROLES | {named.name: named.role for named in settings.roles},
        pressure=PRESSURE[settings.pressure],
    )


__all__ = [
    "ADMIT",
    "EVICT",
    "KEEP_WARM",
    "PLACE",
    "PRESSURE",
    "REPLAY_ONLY",
    "ROLES",
    "bundle",
]
