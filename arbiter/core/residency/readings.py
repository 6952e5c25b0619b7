"""What node agents report: devices, readings, engines that ended (SPEC A10, A16, B1).

Readings are the only source of measured bytes. Those of one node arrive in the order they were
taken: its agent sends the next one only when the last was received.
"""

from arbiter.core import events as ev
from arbiter.core.decisions import KillEngine, Reason
from arbiter.core.eviction import pressure
from arbiter.core.eviction.sleep import confirm_sleep, doubt_asleep
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.ticket import CHARGED, Sizes, State, Ticket
from arbiter.core.state import CoreState, Node, Unclaimed
from arbiter.core.tickets import companions
from arbiter.core.tickets.budget import beyond, foreign_in_budget, lendable, shared_scratch
from arbiter.core.tickets.loads import learn_failure
from arbiter.core.tickets.reclaim import mark_reclaimed, reclaim
from arbiter.errors import ENGINE_DIED
from arbiter.units import Bytes, DeviceId, NodeId, TicketId, after, since

LEARNED_AFTER = 2  # readings while resident; the first may have been taken during the load


def on_node_seen(mind: CoreState, event: ev.NodeSeen) -> None:
    """Nothing is granted on its devices before their first reading."""
    old = mind.nodes.get(event.node)
    node = Node(event.node, {spec.device: spec for spec in event.devices})
    if old is None:
        mind.tell("node_seen", node=event.node, devices=len(event.devices))
    else:
        node.unclaimed = old.unclaimed
        node.readings = {d: r for d, r in old.readings.items() if d in node.devices}
        for device in old.devices.keys() - node.devices.keys():
            _withdraw_device(mind, device)
    mind.nodes[event.node] = node
    mind.estimates.version += 1  # what a learned size may be at most depends on the devices
    mind.ledger.changed.add(event.node)
    _budget(mind, node)


def rebudget(mind: CoreState) -> None:
    """The table has changed, and with it what engines share."""
    for node in mind.nodes.values():
        _budget(mind, node)
        _charge_foreign(mind, node)


def _budget(mind: CoreState, node: Node) -> None:
    scratch = Bytes(sum(shared_scratch(mind.registry.specs.values()).values()))
    for spec in node.devices.values():
        budget = lendable(spec.total_bytes, spec.kind, mind.settings, scratch)
        mind.ledger.put_device(
            DeviceAccount(
                spec.device, node.node, spec.kind, spec.total_bytes, budget, free_bytes=budget
            )
        )


def _withdraw_device(mind: CoreState, device: DeviceId) -> None:
    """The agent no longer sees it: what was on it went with it."""
    for entry in list(mind.ledger.books[device].entries.values()):
        _leave_with_device(mind, entry)
    mind.ledger.drop_device(device)


def on_node_lost(mind: CoreState, event: ev.NodeLost) -> None:
    """Its devices leave, and with them every byte on them. Its holders are gone as well."""
    node = mind.nodes.pop(event.node, None)
    if node is None:
        mind.stale_count += 1
        return
    mind.tell("node_lost", node=event.node)
    for entry in mind.ledger.entries():
        if entry.node == event.node and entry.state is not State.QUEUED:
            _leave_with_device(mind, entry)
    for device in node.devices:
        mind.ledger.drop_device(device)


def _leave_with_device(mind: CoreState, entry: Ticket) -> None:
    if entry.state is State.CLOSED:  # it lived in the process of one that has left
        return
    if entry.state is not State.RECLAIMING:
        reclaim(mind, entry, Reason.LOST)
    mark_reclaimed(mind, entry)


def on_engine_gone(mind: CoreState, event: ev.EngineGone) -> None:
    """No process of it is left and none will start. Its bytes stay until they are seen free."""
    if event.bytes_back and (node := mind.nodes.get(event.node)):
        if node.unclaimed.pop(event.ticket, None):
            _charge_foreign(mind, node)
    entry = mind.live(event.ticket, *CHARGED)
    if entry is None:
        return
    if entry.state is State.LOADING:
        _died_loading(mind, entry)
    elif entry.state is not State.RECLAIMING:
        reclaim(mind, entry, Reason.LOST)
    if event.bytes_back:
        mark_reclaimed(mind, entry)


def _died_loading(mind: CoreState, entry: Ticket) -> None:
    """Its holder's account of why may still come."""
    reclaim(mind, entry, Reason.FAILED)
    learn_failure(mind, entry, ENGINE_DIED, out_of_memory=False)
    mind.broken_loads[entry.ticket] = entry
    if len(mind.broken_loads) > mind.settings.remembered_count:
        mind.broken_loads.popitem(last=False)


# -- readings -------------------------------------------------------------------------------------


def on_measured(mind: CoreState, event: ev.Measured) -> None:
    node = mind.nodes.get(event.node)
    if node is None:
        mind.stale_count += 1  # it introduces itself first
        return
    was_trusted, were_read = node.heard is not None and not node.silent_told, node.readings.keys()
    if not was_trusted or since(node.heard or mind.now, mind.now) >= mind.settings.terms.reading:
        mind.ledger.changed.add(node.node)
    node.heard, node.silent_told = mind.now, False
    mind.alarms.set(("node", node.node), after(mind.now, mind.settings.terms.reading))
    node.readings = {r.device: r for r in event.devices if r.device in node.devices}
    if node.readings.keys() != were_read:
        mind.ledger.changed.add(node.node)
    seen_bytes = companions.shared_bytes(mind, {e.ticket: _sizes(e) for e in event.engines})
    _weigh_all(mind, node, seen_bytes)
    _learn_all(mind, event.engines)
    _note_unclaimed(mind, node, seen_bytes)
    _charge_foreign(mind, node)
    pressure.on_reading(mind, node, event.stalled_fraction)


def _sizes(reading: ev.EngineReading) -> Sizes:
    return {d.device: d.size_bytes for d in reading.measured if d.size_bytes > 0}


def _weigh_all(mind: CoreState, node: Node, seen_bytes: dict[TicketId, Sizes]) -> None:
    charged = {t: e for d in node.devices for t, e in mind.ledger.books[d].entries.items()}
    for ticket in seen_bytes:  # may hold bytes though it was granted none
        if (entry := mind.ledger.find(ticket)) and entry.state in CHARGED:
            charged[ticket] = entry
    for entry in charged.values():
        mind.ledger.weigh(entry, seen_bytes.get(entry.ticket, {}))
        confirm_sleep(mind, entry)
        doubt_asleep(mind, entry)


def _learn_all(mind: CoreState, readings: tuple[ev.EngineReading, ...]) -> None:
    for reading in readings:
        entry = mind.ledger.find(reading.ticket)
        if entry is None or entry.lease or not reading.exact:
            continue  # what a stranger holds says nothing of its next run
        for each in mind.process_of(entry):
            if each.state is State.RESIDENT:
                _learn(mind, each)


def _learn(mind: CoreState, entry: Ticket) -> None:
    """The peak while it serves; how far off the estimate was is told once for each load, which a
    lodger has none of. What it holds while it is grown says nothing of its next load."""
    if entry.grown_bytes:
        return
    shared = sum(entry.scratch_in_use(device) for device in entry.home)
    held = Bytes(entry.at_home_bytes - shared)
    entry.readings_count += 1
    entry.peak_bytes = max(entry.peak_bytes, held)
    if entry.readings_count < LEARNED_AFTER or held == 0:
        return
    mind.estimates.saw_peak(mind.key_of(entry), entry.peak_bytes)
    is_of_load = entry.wakes_count == 0 and entry.lives_in is None
    if entry.readings_count == LEARNED_AFTER and is_of_load:
        if not entry.need_is_explicit:
            mind.estimates.saw_overhead(mind.key_of(entry), entry.need, entry.peak_bytes)
        mind.tell(
            "estimate_error",
            entry,
            size=entry.peak_bytes,
            took=entry.load_took,
            error_bytes=entry.peak_bytes - entry.home_bytes,
            error_ns=entry.load_took - entry.predicted if entry.predicted else None,
        )


def _note_unclaimed(mind: CoreState, node: Node, seen_bytes: dict[TicketId, Sizes]) -> None:
    """Engines whose ticket nobody has named. They count as foreign; when whoever could has had the
    time to rejoin they are ended, again with each reading until they are."""
    before, node.unclaimed = node.unclaimed, {}
    for ticket, sizes in seen_bytes.items():
        entry = mind.ledger.find(ticket)
        if entry is not None and entry.state in CHARGED:
            continue
        engine = before.get(ticket) or Unclaimed(sizes, mind.now)
        node.unclaimed[ticket], engine.measured = engine, sizes
        if not mind.gave_up_waiting:
            continue
        if not engine.is_ending:
            engine.is_ending = True
            mind.tell("unclaimed_engine", unclaimed=ticket, node=node.node)
        mind.say(KillEngine(node.node, ticket))


def claim_unclaimed(mind: CoreState, entry: Ticket) -> None:
    """Its holder has rejoined: what was foreign is now charged to the ticket."""
    node = mind.nodes.get(entry.node)
    engine = node.unclaimed.pop(entry.ticket, None) if node else None
    if node and engine:
        mind.ledger.weigh(entry, engine.measured)
        _charge_foreign(mind, node)


def _charge_foreign(mind: CoreState, node: Node) -> None:
    for device, reading in node.readings.items():
        spec = node.devices[device]
        eats = foreign_in_budget(reading.foreign_bytes, spec.total_bytes, spec.kind, mind.settings)
        orphans = sum(e.measured.get(device, 0) for e in node.unclaimed.values())
        mind.ledger.set_foreign(device, Bytes(eats + orphans + _scratch_kept(mind, device)))


def _scratch_kept(mind: CoreState, device: DeviceId) -> Bytes:
    """More scratch on the device than the reserves cover is nobody's ticket, and not free."""
    entries = [e for e in mind.ledger.books[device].entries.values() if e.dispatch_lock]
    if not entries:
        return Bytes(0)
    reserve = shared_scratch(mind.registry.specs.values())
    return beyond(reserve, ((e.dispatch_lock, e.scratch_in_use(device)) for e in entries))


def on_timer(mind: CoreState, name: NodeId) -> None:
    """The time rule of readings: told once; nothing is granted there until one comes."""
    node = mind.nodes.get(name)
    if node is None or node.heard is None or node.silent_told:
        return
    trusted_until = after(node.heard, mind.settings.terms.reading)
    if mind.now >= trusted_until:
        node.silent_told = True
        mind.tell("node_silent", node=name, took=since(node.heard, mind.now))
    else:
        mind.alarms.set(("node", name), trusted_until)
