"""Frees idle models that hold more than they need, and loads them again (D7): on request, after so
many loads of a device, or for a queued ticket that would fit then, in place of an eviction.

A model is unloaded, which gives back all that its process reserved, and its holder loads it again
as a prefetch does: into room that is free. A ticket that waits comes first, so a model whose room
was taken meanwhile stays cold. What is pinned, in use, or asleep is left alone. Each step follows
from the books as they are, so a lost message delays it and no more; an arbiter that restarts
forgets it.
"""

from arbiter.core import events as ev
from arbiter.core.decisions import Compacted, EventKind, LoadModel, Reason
from arbiter.core.eviction import eviction, waste
from arbiter.core.records.compactions import CompactedTicket, Compaction
from arbiter.core.records.ticket import COMING, LEAVING, Ticket
from arbiter.core.state import CoreState
from arbiter.core.tickets.loads import prefetches_that_make_room
from arbiter.core.types import Priority
from arbiter.units import Bytes, DeviceId, after

# -- asking ---------------------------------------------------------------------------------------


def on_asked(state: CoreState, event: ev.CompactAsked) -> None:
    """Begins a compaction of the named models, or of all that hold enough beyond their need. Raises
    UnknownCapability, UnknownModel, having changed nothing."""
    for name in event.models:
        state.registry.find(name)
    if event.request in state.compactions.runs:
        return
    run = Compaction(event.request)
    state.compactions.begin(run)
    for name in event.models:
        mine = [t for t in state.ledger.of_model(name) if not t.lease]
        run.take_waiting(t.id for t in mine)
        if not mine:
            run.spare(name.model, None, "it is not loaded")
    if not event.models:
        run.take_waiting(t.id for t in waste.wasteful_tickets(state))


def compact_or_evict(
    state: CoreState, asker: Ticket, device: DeviceId, short: Bytes, priority: Priority
) -> bool:
    """Frees idle models that, loaded again, leave `short` bytes more to a queued ticket; where they
    would not suffice, evicts as `eviction.make_room` does, and returns what that returns. These
    models are freed at once, because the ticket waits for the bytes of all of them, and loaded
    again once it has its answer. `arbiter free` takes whole models, which return after it."""
    if asker.frees:
        return eviction.make_room(state, asker, device, short, priority)
    book = state.ledger.books[device]
    options, chosen = waste.compaction_for(state, book, asker, short, priority)
    if not chosen or prefetches_that_make_room(state, book, short):
        return eviction.make_room(state, asker, device, short, priority)
    eviction.record_choice(state, book, asker, short, options, chosen, is_compaction=True)
    run = state.compactions.begin_for(asker.id)
    for option in chosen:
        _free(state, run, book.tickets[option.ticket], asker)
    return True


def _begin_scheduled(state: CoreState) -> None:
    """Begins a compaction of each device on which so many models were loaded since the last."""
    if not state.compactions.loads_count:  # as without a schedule
        return
    for device in state.compactions.take_devices_due(state.settings.compact_every_loads_count):
        tickets = [t.id for t in waste.wasteful_tickets(state) if device in t.home]
        name = f"loads of {device}"
        if tickets and name not in state.compactions.runs:
            state.compactions.begin(Compaction(name, waiting=tickets))


# -- its steps ------------------------------------------------------------------------------------


def advance(state: CoreState) -> None:
    """Takes the steps that have become possible with this event."""
    _begin_scheduled(state)
    for run in list(state.compactions.runs.values()):
        _note_freed(state, run)
        _load_next(state, run)
        _free_next(state, run)
        if run.has_ended:
            state.compactions.end(run)
            _finish(state, run)


def _note_freed(state: CoreState, run: Compaction) -> None:
    """Takes the models that are being freed further: those whose bytes are back are to be loaded
    again, and those that stay after all are left alone."""
    for ticket_id, item in list(run.freeing.items()):
        ticket = state.ledger.find(ticket_id)
        if ticket is None and item.holder not in state.holders:
            run.spare(item.name.model, ticket_id, "its replica has gone")
        elif ticket is None:
            run.end_freeing(item)
            _tell_freed(state, run, item)
        elif ticket.reclaim_late:
            run.spare(ticket.model, ticket_id, "its bytes have not come back")
        elif ticket.state not in LEAVING:
            run.spare(ticket.model, ticket_id, "it was in use after all")


def _tell_freed(state: CoreState, run: Compaction, item: CompactedTicket) -> None:
    state.log(
        EventKind.MODEL_COMPACTED,
        size=item.wasted_bytes,
        capability=item.name.capability,
        model=item.name.model,
        compacted=item.ticket,
        request=run.request,
    )


def _load_next(state: CoreState, run: Compaction) -> None:
    """Has the next freed model loaded, once the queued ticket it made room for has its answer."""
    if run.loading is not None and not _is_coming(state, run.loading):
        run.end_load()
    is_awaited = run.asker is not None and run.asker in state.queue
    while run.freed and not (run.freeing or run.loading or is_awaited):
        item = run.next_to_load()
        is_here = any(_tickets_of(state, item))  # a request has brought it back
        may_load = state.closing_by is None and waste.may_load(state, item.name)
        if item.holder in state.holders and not is_here and may_load:
            _load(state, run, item)


def _load(state: CoreState, run: Compaction, item: CompactedTicket) -> None:
    run.begin_load(item)
    until = after(state.now, state.settings.prefetch_for)
    state.prefetched[item.name] = until  # the load takes free room, and gives way to requests
    state.timers.set(("compaction", run.request), until)
    state.decide(LoadModel(item.holder, item.name.model))


def _is_coming(state: CoreState, item: CompactedTicket) -> bool:
    """Says whether a load is under way, or was asked for and not given up."""
    mine = _tickets_of(state, item)
    if mine:
        return any(ticket.state in COMING for ticket in mine)
    return item.holder in state.holders and state.is_prefetch(item.name, state.now)


def _tickets_of(state: CoreState, item: CompactedTicket) -> list[Ticket]:
    """Returns the tickets of a freed model's holder for that model."""
    return [t for t in state.ledger.held_by(item.holder) if t.model_name == item.name]


def _free_next(state: CoreState, run: Compaction) -> None:
    """Frees the next model that may go, once no other is under way."""
    while run.waiting and not (run.freeing or run.freed or run.loading):
        ticket = state.ledger.find(run.next_to_free())
        if ticket is None:
            continue
        if why := waste.compaction_obstacle(state, ticket):
            run.spare(ticket.model, ticket.id, why)
        else:
            _free(state, run, ticket, None)


def _free(state: CoreState, run: Compaction, ticket: Ticket, asker: Ticket | None) -> None:
    """Asks the holder to let go. The next load is granted what the model needed since its last."""
    wasted = waste.wasted_bytes(state, ticket)
    run.begin_freeing(CompactedTicket(ticket.id, ticket.holder, ticket.model_name, wasted))
    state.compactions.note_waste(ticket.id, is_enough=False)
    state.estimates.compacted(ticket.model_key, waste.settled_bytes(state, ticket))
    eviction.revoke(state, ticket, Reason.COMPACT, asker)


def _finish(state: CoreState, run: Compaction) -> None:
    state.log(
        EventKind.COMPACTION,
        size=run.freed_bytes,
        request=run.request,
        count=run.freed_count,
        spared=len(run.spared),
    )
    state.decide(run.answer())


def progress(state: CoreState, request: str) -> Compacted | None:
    """Returns how far a compaction has come; None when none of this name is under way."""
    run = state.compactions.runs.get(request)
    return run.answer() if run else None


def on_timer(state: CoreState, _: str) -> None:
    """Has `advance` look again: a load that was asked for has not begun in time."""
