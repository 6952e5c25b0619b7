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


def on_demand(pool: Bytes, pinned: Bytes) -> Bytes:
    return Bytes(max(0, pool - pinned))


def pinned_overcommit(pool: Bytes, pinned: Bytes) -> Bytes:
    """Above zero the configuration pins more than can ever be resident."""
    return Bytes(max(0, pinned - pool))
