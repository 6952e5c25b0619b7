"""The arbiter's settings while it runs (C12): read, and changed all or nothing.

A change names the generation it was made of. It is checked as a whole, takes effect as a whole, and
is kept across restarts until the configuration file itself says something else.
"""

from typing import Any

from arbiter.client.admin import call_arbiter
from arbiter.units import Generation
from deployments.config import boot
from deployments.config.arbiter_section import ArbiterConfig
from deployments.config.schema import ConfigError, parse_table

Plain = dict[str, Any]
# Read once.
AT_START_ONLY = frozenset(
    {
        "state_file",
        "event_file",
        "spare_workers",
        "host_pool",
        "disk_pool",
        "pool_sweep_s",
        "replay_s",
    }
)
POLICIES = frozenset({"evict", "admit"})


async def read() -> Plain:
    """The generation, and every setting with its value. Raises ArbiterUnavailable."""
    return _said(await call_arbiter("state"))


async def change(generation: int, wanted: Plain) -> Plain:
    """Of the settings of this generation so many others; None: as by default. Returns what `read`
    does. Raises ConfigError naming each wrong key, SettingsConflict, ArbiterUnavailable."""
    if fixed := sorted(AT_START_ONLY & wanted.keys()):
        raise ConfigError(f"settings.{fixed[0]}: only read when the arbiter starts")
    for name in sorted(POLICIES & wanted.keys()):
        if ":" in str(wanted[name]):  # an API key must not choose what is imported
            raise ConfigError(f"settings.{name}: only serve_config.yaml may name a module")
    state = await call_arbiter("state")
    mine = state["table"].get("arbiter", {}) | wanted
    arbiter = {key: value for key, value in mine.items() if value is not None}
    table = parse_table(state["table"] | {"arbiter": arbiter}, "settings")
    given = Generation(generation)
    new = await call_arbiter("change_settings", boot.configuration(table), given)
    return _said({"generation": new, "table": boot.as_plain(table)})


def _said(state: Plain) -> Plain:
    own = ArbiterConfig.model_validate(state["table"].get("arbiter", {}))
    return {"generation": state["generation"], "settings": own.model_dump(mode="json")}
