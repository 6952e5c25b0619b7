"""Handles what node agents report: devices, readings, engines that ended (A10, A16, B1).

Readings are the only source of measured bytes. Those of one node arrive in the order they were
taken: its agent sends the next one only when the last was received.
"""

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import EventKind, KillEngine, Reason
from arbiter.core.eviction import pressure, waste
from arbiter.core.eviction.sleep import confirm_sleep, end_if_never_slept
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
    devices = _unreadable_devices(old, event) | {d.device: d for d in event.devices}
    may_come = {u.device for u in event.unreadable} - devices.keys()
    node = Node(
        event.node,
        devices,
        may_gain_devices=bool(may_come),
        lost=_lost_gpus(old, event) - devices.keys(),
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
            if not _is_same_card(spec, node.devices.get(spec.device)):
                state.log(
                    EventKind.DEVICE_LOST, node=event.node, device=spec.device, uuid=spec.uuid
                )
                _withdraw_device(state, spec.device)
        for spec in node.devices.values():
            if not _is_same_card(spec, old.devices.get(spec.device)):
                state.log(
                    EventKind.DEVICE_FOUND, node=event.node, device=spec.device, uuid=spec.uuid
                )
    state.nodes[event.node] = node
    slabs.on_agent_seen(state, event.node)
    state.estimates.note_devices_changed()
    state.mark_dirty(event.node)
    _set_budgets(state, node)


def _unreadable_devices(old: Node | None, event: ev.NodeSeen) -> dict[DeviceId, types.DeviceSpec]:
    """Returns the known devices that an agent which has just started cannot read: these are still
    there."""
    devices = old.devices if old else {}
    return {u.device: devices[u.device] for u in event.unreadable if u.device in devices}


def _lost_gpus(old: Node | None, event: ev.NodeSeen) -> frozenset[DeviceId]:
    """Returns the GPUs of a node that fell off the bus at any time: those that the agent names, and
    those known before, because an agent that started after that does not see them any more."""
    known = old.devices.values() if old else ()
    gpus = (spec.device for spec in known if spec.kind is DeviceKind.GPU)
    return frozenset(gpus).union(event.lost, old.lost if old else ())


def _is_same_card(spec: types.DeviceSpec, other: types.DeviceSpec | None) -> bool:
    """Says whether two introductions of a device mean the same card; another card may have taken
    its index."""
    return other is not None and spec.uuid == other.uuid


def recompute_budgets(state: CoreState) -> None:
    """Computes every budget anew, because the table has changed and with it the scratch that
    engines share."""
    for node in state.nodes.values():
        _set_budgets(state, node)
        _charge_foreign(state, node)


def _set_budgets(state: CoreState, node: Node) -> None:
    """Computes the budget of each device of a node, and puts new devices on the books."""
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
            _leave_device(state, ticket, device)
    state.forget_device(device)


def _leave_device(state: CoreState, ticket: Ticket, device: DeviceId) -> None:
    """Ends a ticket whose device has gone, and takes its bytes there off the books."""
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
            _end_with_node(state, ticket)
    for device in node.devices:
        state.forget_device(device)


def _end_with_node(state: CoreState, ticket: Ticket) -> None:
    """Closes a ticket whose node has gone, and every byte of it with the node."""
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
        _end_broken_load(state, ticket)
    elif ticket.state is not State.RECLAIMING:
        reclaim(state, ticket, Reason.LOST)
    if event.bytes_back:
        mark_reclaimed(state, ticket)
        if ticket.lease and (node := state.nodes.get(event.node)):
            _charge_foreign(state, node)  # what its lessee has not given back


def _end_broken_load(state: CoreState, ticket: Ticket) -> None:
    """Ends a load whose engine died. Its holder may still say why (`loads.note_cause`)."""
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
        # A ticket that this reading confirmed asleep gets no part of its device's total any more
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
    """Returns what the reading measured of each ticket, in bytes by device."""
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


def _last_known(node: Node, ticket: Ticket) -> Sizes:
    """Returns the bytes that were last measured of a ticket on devices that cannot be read now."""
    return {d: size for d, size in ticket.measured.items() if d in node.unreadable}


def _sizes(reading: ev.EngineReading) -> Sizes:
    return {d.device: d.size_bytes for d in reading.measured if d.size_bytes > 0}


def _charge_measured(state: CoreState, node: Node, seen_bytes: dict[TicketId, Sizes]) -> None:
    """Charges each ticket of a node what a reading saw it hold, and ends or confirms its sleep."""
    charged = {t.id: t for d in node.devices for t in state.ledger.books[d].tickets.values()}
    for ticket_id in seen_bytes:  # may hold bytes though it was granted none
        if (ticket := state.ledger.find(ticket_id)) and ticket.state in CHARGED:
            charged[ticket_id] = ticket
    for ticket in charged.values():
        sizes = seen_bytes.get(ticket.id, {})
        state.ledger.set_measured(
            ticket, _last_known(node, ticket) | sizes if node.unreadable else sizes
        )
        process_ram.note(state, ticket)
        confirm_sleep(state, ticket)
        end_if_never_slept(state, ticket)


def _learn_all(state: CoreState, readings: tuple[ev.EngineReading, ...]) -> None:
    """Learns from the exact readings of resident models. A lease teaches nothing: what a process
    outside Serve holds says nothing of its next run."""
    for reading in readings:
        ticket = state.ledger.find(reading.ticket)
        if ticket is None or ticket.lease or not reading.exact:
            continue
        if ticket.state is State.RESIDENT:
            _learn(state, ticket)


def _learn(state: CoreState, ticket: Ticket) -> None:
    """Learns the peak of a ticket while it serves, and logs once for each load how far off the
    estimate was. What a ticket holds while it is grown says nothing of its next load."""
    if (ticket.grown and ticket.grown.beyond_load_bytes) or not inexact.teaches(state, ticket):
        return
    shared = sum(ticket.scratch_in_use(device) for device in ticket.home)
    held = Bytes(ticket.measured_home_bytes - shared)
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
            error_bytes=load.peak_bytes - ticket.granted_home_bytes,
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


def charge_unclaimed(state: CoreState, ticket: Ticket) -> None:
    """Charges a ticket the measured bytes of its engine, which were foreign until its holder
    rejoined."""
    node = state.nodes.get(ticket.node)
    engine = node.unclaimed.pop(ticket.id, None) if node else None
    if node and engine:
        state.ledger.set_measured(ticket, engine.measured)
        _charge_foreign(state, node)


def _charge_foreign(state: CoreState, node: Node) -> None:
    """Sets the foreign bytes of each device that was read: those of no ticket that eat into the
    budget, those of unclaimed engines, and scratch beyond the reserves."""
    for device, reading in node.readings.items():
        spec = node.devices[device]
        used = Bytes(reading.foreign_bytes - lessees.taken_bytes(state, node, device))
        if spec.kind in (DeviceKind.CPU, DeviceKind.HOST):  # budgets of one RAM
            used = Bytes(used + node.pool_bytes)
        eats = foreign_in_budget(used, spec.total_bytes, spec.kind, state.settings)
        unclaimed = sum(lost.measured.get(device, 0) for lost in node.unclaimed.values())
        state.ledger.set_foreign(device, Bytes(eats + unclaimed + _scratch_kept(state, device)))


def _scratch_kept(state: CoreState, device: DeviceId) -> Bytes:
    """Returns the bytes of scratch in use on a device that the reserves do not cover. No ticket is
    charged these bytes, and they are not free."""
    tickets = [t for t in state.ledger.books[device].tickets.values() if t.dispatch_lock]
    if not tickets:
        return Bytes(0)
    reserve = shared_scratch(state.registry.specs.values())
    return beyond(reserve, ((t.dispatch_lock, t.scratch_in_use(device)) for t in tickets))


def on_timer(state: CoreState, name: NodeId) -> None:
    """Runs the time rule of readings: logs once that a node is silent. Nothing is granted there
    until its next reading comes."""
    node = state.nodes.get(name)
    if node is None or node.heard_at is None or node.silent_told:
        return
    trusted_until = after(node.heard_at, state.settings.timeouts.reading)
    if state.now >= trusted_until:
        node.silent_told = True
        state.log(EventKind.NODE_SILENT, node=name, took=since(node.heard_at, state.now))
    else:
        state.timers.set(("node", name), trusted_until)
