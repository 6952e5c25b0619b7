"""How much of a device may be lent (SPEC B2, B3). Pure arithmetic on whole bytes, rounded down.

total --0.9, cap--> arena --0.1 wiggle, margin--> budget = what tickets may be charged
"""

from arbiter.events import DeviceKind
from arbiter.settings import Settings
from arbiter.units import Bytes


def share(size: Bytes, fraction: float) -> Bytes:
    return Bytes(int(size * fraction))


def arena(total: Bytes, kind: DeviceKind, settings: Settings) -> Bytes:
    """The part of the device that is ours to plan with."""
    cap = settings.arenas.cap(kind)
    ours = share(total, settings.arena_fraction)
    return ours if cap is None else min(ours, cap)


def lendable(total: Bytes, kind: DeviceKind, settings: Settings) -> Bytes:
    """The budget: what free + charged + foreign must always sum to."""
    ours = arena(total, kind, settings)
    margin = settings.gpu_margin_bytes if kind is DeviceKind.GPU else 0
    return Bytes(max(0, ours - share(ours, settings.wiggle_fraction) - margin))


def foreign_in_budget(foreign: Bytes, total: Bytes, kind: DeviceKind, settings: Settings) -> Bytes:
    """Foreign bytes that eat into the budget. A cap below the arena leaves the rest of the device
    to others, so they fill that first; without a cap every foreign byte counts."""
    left_to_others = share(total, settings.arena_fraction) - arena(total, kind, settings)
    return Bytes(max(0, foreign - left_to_others))


# Engines that share one dispatch lock run one at a time and so share one reserved scratch area.


def scratch_ceiling(arena_bytes: Bytes, settings: Settings) -> Bytes:
    return Bytes(arena_bytes - share(arena_bytes, settings.wiggle_fraction))


def weight_pool(
    arena_bytes: Bytes, fraction: float, max_scratch: Bytes, settings: Settings
) -> Bytes:
    """What weights may take beside the largest scratch any of the sharing engines needs."""
    ceiling = scratch_ceiling(arena_bytes, settings)
    return Bytes(max(0, min(share(arena_bytes, fraction), ceiling - max_scratch)))


def on_demand(pool: Bytes, pinned: Bytes) -> Bytes:
    return Bytes(max(0, pool - pinned))


def pinned_overcommit(pool: Bytes, pinned: Bytes) -> Bytes:
    """Above zero the configuration pins more than can ever be resident; flagged at start."""
    return Bytes(max(0, pinned - pool))
