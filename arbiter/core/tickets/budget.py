"""Computes how much of a device may be lent (B2, B3), in whole bytes, rounded down.

The budget is what tickets may be charged. It is computed in three steps, whose fractions are
settings:

    arena   = 0.9 of the device's total, or the configured cap where that is less
    ceiling = the arena without 0.1 of it, the wiggle room for what estimates miss
    budget  = the ceiling without the shared scratch, and on a GPU without the driver's margin

A ticket is charged its own scratch, unless its engine computes under a dispatch lock: engines that
share a lock take turns, so one reserve, as large as the largest of their scratches, serves them all
and is taken off before anything is lent.
"""

from collections.abc import Iterable

from arbiter.core.settings import Settings
from arbiter.core.types import CapabilitySpec, DeviceKind
from arbiter.units import Bytes


def fraction_of(size: Bytes, fraction: float) -> Bytes:
    """Returns a fraction (0 to 1) of a size, rounded down to whole bytes."""
    return Bytes(int(size * fraction))


def arena(total: Bytes, kind: DeviceKind, settings: Settings) -> Bytes:
    """Returns the arena: the part of a device that the arbiter may plan with."""
    cap = settings.arenas.cap(kind)
    ours = fraction_of(total, settings.arena_fraction)
    return ours if cap is None else min(ours, cap)


def budget_of(
    total: Bytes, kind: DeviceKind, settings: Settings, scratch: Bytes = Bytes(0)
) -> Bytes:
    """Returns the budget of a device: what free + charged + foreign must always sum to. `scratch`:
    the bytes that engines share under their dispatch locks. None are kept on host RAM, where
    weights sleep and nothing computes."""
    ours = arena(total, kind, settings)
    ceiling = ours - fraction_of(ours, settings.wiggle_fraction)
    shared = 0 if kind is DeviceKind.HOST else scratch
    margin = settings.gpu_margin_bytes if kind is DeviceKind.GPU else 0
    pool = min(fraction_of(ours, settings.pool_fraction), ceiling - shared)
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
    left_to_others = fraction_of(total, settings.arena_fraction) - arena(total, kind, settings)
    return Bytes(max(0, foreign - left_to_others))


def unpinned(budget: Bytes, pinned: Bytes) -> Bytes:
    """Returns the part of a budget that pinned tickets leave to others; 0 where they pin more."""
    return Bytes(max(0, budget - pinned))


def pinned_overcommit(budget: Bytes, pinned: Bytes) -> Bytes:
    """Returns by how many bytes pinned tickets exceed a budget; 0: they do not."""
    return Bytes(max(0, pinned - budget))
