"""Frees idle models that hold more than they need, and loads them again (D7): on request, after so
many loads of a device, or for a queued ticket that would fit then, in place of an eviction.

A model is unloaded, which gives back all that its process reserved, and its holder loads it again
as a prefetch does: into room that is free. A ticket that waits comes first, so a model whose room
was taken meanwhile stays cold. What is pinned, in use, or asleep is left alone. Each step follows
from the books as they are, so a lost message delays it and no more; an arbiter that restarts
forgets it.
"""

from collections.abc import Iterable

from arbiter.core import events as ev
from arbiter.core.decisions import Compacted, EventKind, LoadModel, Reason, SparedModel
from arbiter.core.eviction import eviction, waste
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.state import CompactedTicket, Compaction, CoreState
from arbiter.core.tickets.loads import prefetches_that_make_room
from arbiter.core.types import Priority
from arbiter.units import Bytes, DeviceId, after

GOES = frozenset({State.DRAINING, State.RECLAIMING})
COMES = frozenset({State.QUEUED, State.LOADING})

# -- asking ---------------------------------------------------------------------------------------


def on_asked(state: CoreState, event: ev.CompactAsked) -> None:
    """Begins a compaction of the named models, or of all that hold enough beyond their need. Raises
    UnknownCapability, UnknownModel, having changed nothing."""
    for name in event.models:
        state.registry.find(name)
    if event.request in state.compactions:
        return
    run = state.compactions[event.request] = Compaction(event.request)
    for name in event.models:
        mine = [e for e in state.ledger.entries() if e.model_name == name and not e.lease]
        run.waiting += [e.ticket for e in mine]
        if not mine:
            run.spared.append(SparedModel(name.model, None, "it is not loaded"))
    if not event.models:
        run.waiting += [e.ticket for e in waste.wasteful_tickets(state)]


def make_room(
    state: CoreState, waiting: Ticket, device: DeviceId, short: Bytes, urgent: Priority
) -> bool:
    """Frees idle models that, loaded again, leave `short` bytes more to a queued ticket; where they
    would not suffice, evicts as `eviction.make_room` does, and returns what that returns. These
    models are freed at once, because the ticket waits for the bytes of all of them, and loaded
    again once it has its answer."""
    book = state.ledger.books[device]
    options, chosen = waste.compaction_for(state, book, waiting, short, urgent)
    if not chosen or prefetches_that_make_room(state, book, short):
        return eviction.make_room(state, waiting, device, short, urgent)
    eviction.remember(state, book, waiting, short, options, chosen, is_compaction=True)
    name = f"for {waiting.ticket}"
    run = state.compactions.setdefault(name, Compaction(name, asker=waiting.ticket))
    for option in chosen:
        _free(state, run, book.entries[option.ticket], waiting)
    return True


def _begin_scheduled(state: CoreState) -> None:
    """Begins a compaction of each device on which so many models were loaded since the last."""
    every_count = state.settings.compact_every_loads_count
    for device, count in list(state.loads_count.items()):  # empty without a schedule
        if count < every_count:
            continue
        del state.loads_count[device]
        here = [e.ticket for e in waste.wasteful_tickets(state) if device in e.home]
        name = f"loads of {device}"
        if here and name not in state.compactions:
            state.compactions[name] = Compaction(name, waiting=here)


# -- its steps ------------------------------------------------------------------------------------


def advance(state: CoreState) -> None:
    """Takes the steps that have become possible with this event."""
    _begin_scheduled(state)
    for run in list(state.compactions.values()):
        _note_freed(state, run)
        _load_next(state, run)
        _free_next(state, run)
        if not (run.freeing or run.freed or run.loading):
            del state.compactions[run.request]
            _finish(state, run)


def _note_freed(state: CoreState, run: Compaction) -> None:
    for ticket, item in list(run.freeing.items()):
        entry = state.ledger.find(ticket)
        if entry is not None and entry.state in GOES and not entry.reclaim_late:
            continue
        del run.freeing[ticket]
        if entry is None:
            _count(state, run, item)
        else:
            is_late = entry.reclaim_late
            why = "its bytes have not come back" if is_late else "it was in use after all"
            _spare(run, entry, why)


def _count(state: CoreState, run: Compaction, item: CompactedTicket) -> None:
    """Counts a model whose bytes were seen back."""
    run.count += 1
    run.freed_bytes = Bytes(run.freed_bytes + item.wasted_bytes)
    run.freed.append(item)
    state.log(
        EventKind.MODEL_COMPACTED,
        size=item.wasted_bytes,
        capability=item.name.capability,
        model=item.name.model,
        compacted=item.ticket,
        request=run.request,
    )


def _load_next(state: CoreState, run: Compaction) -> None:
    if run.loading is not None and not _is_coming(state, run.loading):
        run.loading = None
    is_awaited = run.asker is not None and run.asker in state.queue
    while run.freed and not (run.freeing or run.loading or is_awaited):
        item = run.freed.pop(0)
        if item.holder in state.holders and waste.may_load(state, item.name):
            _load(state, run, item)


def _load(state: CoreState, run: Compaction, item: CompactedTicket) -> None:
    """Has the holder load a model again, unless a request has brought it back already."""
    if any(True for _ in _tickets_of(state, item)):
        return
    run.loading = item
    until = after(state.now, state.settings.prefetch_for)
    state.prefetched[item.name] = until  # the load takes free room, and gives way to requests
    state.timers.set(("compaction", run.request), until)
    state.decide(LoadModel(item.holder, item.name.model))


def _is_coming(state: CoreState, item: CompactedTicket) -> bool:
    """Says whether a load is under way, or was asked for and not given up."""
    mine = list(_tickets_of(state, item))
    if any(entry.state in COMES for entry in mine):
        return True
    until = state.prefetched.get(item.name)
    is_awaited = item.holder in state.holders and until is not None and state.now < until
    return is_awaited and not mine


def _tickets_of(state: CoreState, item: CompactedTicket) -> Iterable[Ticket]:
    return (e for e in state.ledger.held_by(item.holder) if e.model_name == item.name)


def _free_next(state: CoreState, run: Compaction) -> None:
    """Frees the next model that may go, once no other is under way."""
    while run.waiting and not (run.freeing or run.freed or run.loading):
        entry = state.ledger.find(run.waiting.pop(0))
        if entry is None:
            continue
        if why := waste.compaction_obstacle(state, entry):
            _spare(run, entry, why)
        else:
            _free(state, run, entry, None)


def _free(state: CoreState, run: Compaction, entry: Ticket, asker: Ticket | None) -> None:
    wasted = waste.wasted_bytes(state, entry)
    settled = waste.settled_bytes(state, entry)
    item = CompactedTicket(entry.ticket, entry.holder, entry.model_name, wasted, settled)
    run.freeing[entry.ticket] = item
    state.wasteful.pop(entry.ticket, None)
    state.estimates.compacted(state.key_of(entry), settled)
    eviction.revoke(state, entry, Reason.COMPACT, asker)


def _spare(run: Compaction, entry: Ticket, why: str) -> None:
    run.spared.append(SparedModel(entry.model, entry.ticket, why))


def _finish(state: CoreState, run: Compaction) -> None:
    state.log(
        EventKind.COMPACTION,
        size=run.freed_bytes,
        request=run.request,
        count=run.count,
        spared=len(run.spared),
    )
    state.decide(_answer(run, is_finished=True))


def _answer(run: Compaction, *, is_finished: bool) -> Compacted:
    return Compacted(run.request, run.count, run.freed_bytes, tuple(run.spared), is_finished)


def progress(state: CoreState, request: str) -> Compacted | None:
    """Returns how far a compaction has come; None when none of this name is under way."""
    run = state.compactions.get(request)
    return _answer(run, is_finished=False) if run else None


def on_timer(state: CoreState, _: str) -> None:
    """Has `advance` look again: a load that was asked for has not begun in time."""
