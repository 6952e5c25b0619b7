"""How much of a device may be lent (B2, B3). Pure arithmetic on whole bytes, rounded down.

total --0.9, cap--> arena --0.1 wiggle--> ceiling --shared scratch, margin--> budget

The budget is what tickets may be charged. A ticket is charged its own scratch, unless its engine
computes under a dispatch lock: engines that share a lock take turns, so one reserve, as large as
the largest of their scratches, serves them all and is taken off before anything is lent.
"""

from collections.abc import Iterable

from arbiter.core.settings import Settings
from arbiter.core.types import CapabilitySpec, DeviceKind
from arbiter.units import Bytes


def share(size: Bytes, fraction: float) -> Bytes:
    """Returns a fraction of a size, rounded down."""
    return Bytes(int(size * fraction))


def arena(total: Bytes, kind: DeviceKind, settings: Settings) -> Bytes:
    """Returns the part of a device that is ours to plan with."""
    cap = settings.arenas.cap(kind)
    ours = share(total, settings.arena_fraction)
    return ours if cap is None else min(ours, cap)


def lendable(
    total: Bytes, kind: DeviceKind, settings: Settings, scratch: Bytes = Bytes(0)
) -> Bytes:
    """Returns the budget: what free + charged + foreign must always sum to. `scratch`: what engines
    share under their dispatch locks; nothing computes on host RAM that holds sleeping weights."""
    ours = arena(total, kind, settings)
    ceiling = ours - share(ours, settings.wiggle_fraction)
    shared = 0 if kind is DeviceKind.HOST else scratch
    margin = settings.gpu_margin_bytes if kind is DeviceKind.GPU else 0
    pool = min(share(ours, settings.pool_fraction), ceiling - shared)
    return Bytes(max(0, pool - margin))


def shared_scratch(specs: Iterable[CapabilitySpec]) -> dict[str, Bytes]:
    """Returns, by dispatch lock, the largest scratch of the models that compute under it. It is
    reserved on every device, since any of them may be placed there."""
    most: dict[str, Bytes] = {}
    for model in (m for spec in specs for m in spec.models if m.dispatch_lock):
        largest = most.get(model.dispatch_lock, Bytes(0))
        most[model.dispatch_lock] = max(largest, model.shared_scratch_bytes)
    return most


def beyond(reserve: dict[str, Bytes], in_use: Iterable[tuple[str, Bytes]]) -> Bytes:
    """Returns the scratch seen in use (lock, bytes) that the reserve of its lock does not cover:
    engines that kept theirs when they gave the lock back."""
    held: dict[str, int] = {}
    for lock, size in in_use:
        held[lock] = held.get(lock, 0) + size
    return Bytes(sum(max(0, size - reserve.get(lock, 0)) for lock, size in held.items()))


def foreign_in_budget(foreign: Bytes, total: Bytes, kind: DeviceKind, settings: Settings) -> Bytes:
    """Returns the foreign bytes that eat into the budget. A cap below the arena leaves the rest of
    the device to others, so they fill that first; without a cap every foreign byte counts."""
    left_to_others = share(total, settings.arena_fraction) - arena(total, kind, settings)
    return Bytes(max(0, foreign - left_to_others))


def on_demand(pool: Bytes, pinned: Bytes) -> Bytes:
    """Returns what of a budget is not pinned."""
    return Bytes(max(0, pool - pinned))


def pinned_overcommit(pool: Bytes, pinned: Bytes) -> Bytes:
    """Returns by how much the configuration pins more than can ever be resident."""
    return Bytes(max(0, pinned - pool))
