"""Handles what node agents report: devices, readings, engines that ended (A10, A16, B1).

Readings are the only source of measured bytes. Those of one node arrive in the order they were
taken: its agent sends the next one only when the last was received.
"""

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import EventKind, KillEngine, Reason
from arbiter.core.eviction import pressure, waste
from arbiter.core.eviction.sleep import confirm_sleep, doubt_asleep
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.ticket import CHARGED, Sizes, State, Ticket
from arbiter.core.residency import copy_readings, slabs
from arbiter.core.state import CoreState, Node, Unclaimed
from arbiter.core.tickets import inexact, lessees, process_ram
from arbiter.core.tickets.budget import beyond, budget_of, foreign_in_budget, shared_scratch
from arbiter.core.tickets.loads import learn_failure
from arbiter.core.tickets.reclaim import mark_reclaimed, reclaim
from arbiter.core.types import DeviceKind
from arbiter.errors import ENGINE_DIED
from arbiter.units import Bytes, DeviceId, NodeId, TicketId, after, since

LEARNED_AFTER = 2  # readings while resident; the first may have been taken during the load


def on_node_seen(state: CoreState, event: ev.NodeSeen) -> None:
    """Takes a node and its devices. Nothing is granted on a device before its first reading."""
    old = state.nodes.get(event.node)
    devices = _still_there(old, event) | {d.device: d for d in event.devices}
    may_come = {u.device for u in event.unreadable} - devices.keys()
    node = Node(
        event.node,
        devices,
        may_gain_devices=bool(may_come),
        lost=_lost(old, event) - devices.keys(),
    )
    if old is None:
        state.log(EventKind.NODE_SEEN, node=event.node, devices=len(event.devices))
    else:
        node.unclaimed = old.unclaimed
        node.unreadable = old.unreadable
        node.inexact = old.inexact
        node.copies = old.copies  # until its readings say otherwise
        node.readings = {d: r for d, r in old.readings.items() if d in node.devices}
        for spec in old.devices.values():
            if not _is_same(spec, node.devices.get(spec.device)):
                state.log(
                    EventKind.DEVICE_LOST, node=event.node, device=spec.device, uuid=spec.uuid
                )
                _withdraw_device(state, spec.device)
        for spec in node.devices.values():
            if not _is_same(spec, old.devices.get(spec.device)):
                state.log(
                    EventKind.DEVICE_FOUND, node=event.node, device=spec.device, uuid=spec.uuid
                )
    state.nodes[event.node] = node
    slabs.on_agent_seen(state, event.node)
    state.estimates.note_devices_changed()
    state.mark_dirty(event.node)
    _budget(state, node)


def _still_there(old: Node | None, event: ev.NodeSeen) -> dict[DeviceId, types.DeviceSpec]:
    """Known devices that a newly started agent cannot read: these have not gone."""
    devices = old.devices if old else {}
    return {u.device: devices[u.device] for u in event.unreadable if u.device in devices}


def _lost(old: Node | None, event: ev.NodeSeen) -> frozenset[DeviceId]:
    """GPUs that fell off the bus at some time: an agent that was started after that does not count
    them any more."""
    known = old.devices.values() if old else ()
    gpus = (spec.device for spec in known if spec.kind is DeviceKind.GPU)
    return frozenset(gpus).union(event.lost, old.lost if old else ())


def _is_same(spec: types.DeviceSpec, other: types.DeviceSpec | None) -> bool:
    """False if another card has taken the index."""
    return other is not None and spec.uuid == other.uuid


def rebudget(state: CoreState) -> None:
    """Computes every budget anew: the table has changed, and with it what engines share."""
    for node in state.nodes.values():
        _budget(state, node)
        _charge_foreign(state, node)


def _budget(state: CoreState, node: Node) -> None:
    scratch = Bytes(sum(shared_scratch(state.registry.specs.values()).values()))
    for spec in node.devices.values():
        budget = budget_of(spec.total_bytes, spec.kind, state.settings, scratch)
        state.ledger.put_device(
            DeviceAccount(
                spec.device, node.node, spec.kind, spec.total_bytes, budget, free_bytes=budget
            )
        )


def _withdraw_device(state: CoreState, device: DeviceId) -> None:
    """Removes a device that the agent no longer sees: its tickets end, and so do asleep tickets
    that can wake only there. Their bytes on other devices stay charged until the agent sees them
    back."""
    for ticket in state.ledger.tickets(*CHARGED):
        if device in ticket.devices or device in ticket.home:
            _lose(state, ticket, device)
    state.forget_device(device)


def _lose(state: CoreState, ticket: Ticket, device: DeviceId) -> None:
    if ticket.state is not State.RECLAIMING:
        reclaim(state, ticket, Reason.LOST)
    state.ledger.leave(ticket, device)
    if not any(ticket.charge(other) for other in ticket.devices):
        mark_reclaimed(state, ticket)


def on_node_lost(state: CoreState, event: ev.NodeLost) -> None:
    """Removes a node, its devices and every byte on them. Its holders are gone as well."""
    node = state.nodes.pop(event.node, None)
    if node is None:
        state.stale_count += 1
        return
    state.log(EventKind.NODE_LOST, node=event.node)
    state.queue.note_copies(event.node, frozenset())
    for ticket in state.ledger.tickets():
        if ticket.node == event.node and ticket.state is not State.QUEUED:
            _leave_with_device(state, ticket)
    for device in node.devices:
        state.forget_device(device)


def _leave_with_device(state: CoreState, ticket: Ticket) -> None:
    if ticket.state is not State.RECLAIMING:
        reclaim(state, ticket, Reason.LOST)
    mark_reclaimed(state, ticket)


def on_engine_gone(state: CoreState, event: ev.EngineGone) -> None:
    """Ends the ticket of an engine of which no process is left and none will start. Its bytes stay
    on the books until they are seen free."""
    if event.bytes_back and (node := state.nodes.get(event.node)):
        if node.unclaimed.pop(event.ticket, None):
            _charge_foreign(state, node)
    ticket = state.find_or_count_stale(event.ticket, *CHARGED)
    if ticket is None:
        return
    if ticket.state is State.LOADING:
        _died_loading(state, ticket)
    elif ticket.state is not State.RECLAIMING:
        reclaim(state, ticket, Reason.LOST)
    if event.bytes_back:
        mark_reclaimed(state, ticket)
        if ticket.lease and (node := state.nodes.get(event.node)):
            _charge_foreign(state, node)  # what its lessee has not given back


def _died_loading(state: CoreState, ticket: Ticket) -> None:
    """Ends a load whose engine died. Its holder's account of why may still come."""
    reclaim(state, ticket, Reason.FAILED)
    learn_failure(state, ticket, ENGINE_DIED, out_of_memory=False)
    state.broken_loads[ticket.id] = ticket
    if len(state.broken_loads) > state.settings.remembered_count:
        state.broken_loads.popitem(last=False)


# -- readings -------------------------------------------------------------------------------------


def on_measured(state: CoreState, event: ev.Measured) -> None:
    """Takes a full reading of a node: charges its tickets what they were measured to hold, learns
    from them, and counts what is foreign."""
    node = state.nodes.get(event.node)
    if node is None:
        state.stale_count += 1  # it introduces itself first
        return
    was_trusted = node.heard_at is not None and not node.silent_told
    were_read = node.readings.keys()
    if (
        not was_trusted
        or since(node.heard_at or state.now, state.now) >= state.settings.timeouts.reading
    ):
        state.mark_dirty(node.node)
    node.heard_at = state.now
    node.silent_told = False
    state.timers.set(("node", node.node), after(state.now, state.settings.timeouts.reading))
    node.readings = {r.device: r for r in event.devices if r.device in node.devices}
    node.inexact = frozenset(d for d, reading in node.readings.items() if not reading.exact)
    if node.readings.keys() != were_read:
        state.mark_dirty(node.node)
    _note_unreadable(state, node, event.unreadable)
    slabs.note_slabs(state, node, event)
    copy_readings.note_copies(state, node, event)
    seen_bytes = _measured_by_ticket(state, node, event)
    _charge_measured(state, node, seen_bytes)
    if node.inexact:
        # Tickets just seen asleep have no share any more
        seen_bytes = _measured_by_ticket(state, node, event)
        _charge_measured(state, node, seen_bytes)
    version = state.estimates.version
    _learn_all(state, event.engines)
    if state.estimates.version != version:
        state.mark_dirty(*state.queue.nodes)  # queued tickets need less, or more
    _note_unclaimed(state, node, seen_bytes)
    lessees.note_reading(state, node, seen_bytes)
    _charge_foreign(state, node)
    pressure.on_reading(state, node, event.stalled_fraction)


def _measured_by_ticket(state: CoreState, node: Node, event: ev.Measured) -> dict[TicketId, Sizes]:
    by_engine = {engine.ticket: _sizes(engine) for engine in event.engines}
    return inexact.shared(state, node, by_engine)


def _note_unreadable(
    state: CoreState, node: Node, unreadable: tuple[ev.DeviceUnreadable, ...]
) -> None:
    """Tells when a device becomes unreadable, when the cause changes, and when it is over. The
    arbiter grants nothing there meanwhile, because the reading lacks the device."""
    before = node.unreadable
    node.unreadable = {u.device: u.cause for u in unreadable if u.device in node.devices}
    for device, cause in node.unreadable.items():
        if before.get(device) != cause:
            state.log(EventKind.DEVICE_UNREADABLE, node=node.node, device=device, cause=cause)
    for device in before:
        if device not in node.unreadable and device in node.devices:
            state.log(EventKind.DEVICE_READABLE, node=node.node, device=device)


def _as_known(node: Node, ticket: Ticket) -> Sizes:
    """The ticket's last measured bytes on unreadable devices."""
    return {d: size for d, size in ticket.measured.items() if d in node.unreadable}


def _sizes(reading: ev.EngineReading) -> Sizes:
    return {d.device: d.size_bytes for d in reading.measured if d.size_bytes > 0}


def _charge_measured(state: CoreState, node: Node, seen_bytes: dict[TicketId, Sizes]) -> None:
    charged = {t.id: t for d in node.devices for t in state.ledger.books[d].tickets.values()}
    for ticket_id in seen_bytes:  # may hold bytes though it was granted none
        if (ticket := state.ledger.find(ticket_id)) and ticket.state in CHARGED:
            charged[ticket_id] = ticket
    for ticket in charged.values():
        sizes = seen_bytes.get(ticket.id, {})
        state.ledger.set_measured(
            ticket, _as_known(node, ticket) | sizes if node.unreadable else sizes
        )
        process_ram.note(state, ticket)
        confirm_sleep(state, ticket)
        doubt_asleep(state, ticket)


def _learn_all(state: CoreState, readings: tuple[ev.EngineReading, ...]) -> None:
    for reading in readings:
        ticket = state.ledger.find(reading.ticket)
        if ticket is None or ticket.lease or not reading.exact:
            continue  # what a stranger holds says nothing of its next run
        if ticket.state is State.RESIDENT:
            _learn(state, ticket)


def _learn(state: CoreState, ticket: Ticket) -> None:
    """Learns the peak of a ticket while it serves, and logs once for each load how far off the
    estimate was. What a ticket holds while it is grown says nothing of its next load."""
    if (ticket.grown and ticket.grown.beyond_load_bytes) or not inexact.teaches(state, ticket):
        return
    shared = sum(ticket.scratch_in_use(device) for device in ticket.home)
    held = Bytes(ticket.at_home_bytes - shared)
    ticket.note_reading(held)
    load = ticket.last_load
    key = ticket.model_key
    if load.readings_count < LEARNED_AFTER or held == 0:
        return
    state.estimates.saw_peak(key, load.peak_bytes)
    if settled := ticket.note_settled():
        state.estimates.saw_settled(key, settled)
    waste.note(state, ticket)
    if load.readings_count == LEARNED_AFTER and ticket.wakes_count == 0:
        if not ticket.need_is_explicit:
            state.estimates.saw_overhead(key, ticket.need, load.peak_bytes)
        state.log(
            EventKind.ESTIMATE_ERROR,
            ticket,
            size=load.peak_bytes,
            took=load.took,
            error_bytes=load.peak_bytes - ticket.home_bytes,
            error_ns=load.took - load.predicted if load.predicted else None,
        )


def _note_unclaimed(state: CoreState, node: Node, seen_bytes: dict[TicketId, Sizes]) -> None:
    """Notes engines whose ticket no holder has named. They count as foreign; once the holder that
    could name them has had the time to rejoin they are killed, again with each reading until they
    are gone. A holder has that time from the first reading on also where the state file names no
    holder to wait for, because it was lost or could not be written."""
    before = node.unclaimed
    node.unclaimed = {}
    for ticket_id, sizes in seen_bytes.items():
        ticket = state.ledger.find(ticket_id)
        if ticket is not None and ticket.state in CHARGED:
            continue
        engine = before.get(ticket_id) or Unclaimed(sizes, state.now)
        node.unclaimed[ticket_id] = engine
        engine.measured = sizes
        has_ended = ticket_id in state.answers  # in this epoch, so no holder names it any more
        claimed_by = after(engine.first_seen, state.settings.timeouts.rejoin)
        if not state.gave_up_waiting or (not has_ended and state.now < claimed_by):
            continue
        if not engine.is_ending:
            engine.is_ending = True
            state.log(EventKind.UNCLAIMED_ENGINE, unclaimed=ticket_id, node=node.node)
        state.decide(KillEngine(node.node, ticket_id))


def claim_unclaimed(state: CoreState, ticket: Ticket) -> None:
    """Charges to a ticket what was foreign until its holder rejoined."""
    node = state.nodes.get(ticket.node)
    engine = node.unclaimed.pop(ticket.id, None) if node else None
    if node and engine:
        state.ledger.set_measured(ticket, engine.measured)
        _charge_foreign(state, node)


def _charge_foreign(state: CoreState, node: Node) -> None:
    for device, reading in node.readings.items():
        spec = node.devices[device]
        used = Bytes(reading.foreign_bytes - lessees.taken_bytes(state, node, device))
        if spec.kind in (DeviceKind.CPU, DeviceKind.HOST):  # budgets of one RAM
            used = Bytes(used + node.pool_bytes)
        eats = foreign_in_budget(used, spec.total_bytes, spec.kind, state.settings)
        unclaimed = sum(lost.measured.get(device, 0) for lost in node.unclaimed.values())
        state.ledger.set_foreign(device, Bytes(eats + unclaimed + _scratch_kept(state, device)))


def _scratch_kept(state: CoreState, device: DeviceId) -> Bytes:
    """Returns the scratch on a device beyond what the reserves cover: it is on no ticket, and not
    free."""
    tickets = [t for t in state.ledger.books[device].tickets.values() if t.dispatch_lock]
    if not tickets:
        return Bytes(0)
    reserve = shared_scratch(state.registry.specs.values())
    return beyond(reserve, ((t.dispatch_lock, t.scratch_in_use(device)) for t in tickets))


def on_timer(state: CoreState, name: NodeId) -> None:
    """Runs the time rule of readings: logged once; nothing is granted there until a reading
    comes."""
    node = state.nodes.get(name)
    if node is None or node.heard_at is None or node.silent_told:
        return
    trusted_until = after(node.heard_at, state.settings.timeouts.reading)
    if state.now >= trusted_until:
        node.silent_told = True
        state.log(EventKind.NODE_SILENT, node=name, took=since(node.heard_at, state.now))
    else:
        state.timers.set(("node", name), trusted_until)
