"""From asking to a grant (SPEC A3, A4, B6, C6, C7): who may ask, who is next, where it goes."""

from arbiter import events as ev
from arbiter import floors, gangs, preload, pressure, urgency
from arbiter import leases_held as leases
from arbiter.decisions import Grant
from arbiter.errors import (
    ArbiterClosing,
    DeadlineUnmet,
    HolderQuarantined,
    ModelCoolingDown,
    NeverFits,
    QueueFull,
    RequestError,
    StaleEpoch,
    TicketClosed,
    UnknownCapability,
    UnknownModel,
)
from arbiter.eviction import make_room, min_residency_ends
from arbiter.ledger import Entry, Sizes, State
from arbiter.loads import retried
from arbiter.mind import Holder, Mind, Node
from arbiter.reclaim import kept_bytes
from arbiter.sites import cap_pins, compute_books, flag_pinned_on, is_trusted, on_demand_of
from arbiter.units import Bytes, DeviceId, Epoch, after, in_seconds, since
from arbiter.view import Site

NEVER_JOINED = Epoch(0)


# -- asking ---------------------------------------------------------------------------------------


def requested(mind: Mind, event: ev.Requested) -> None:
    """The ticket id is an idempotency key: asking again repeats the answer."""
    if entry := mind.ledger.find(event.ticket):
        _asked_again(mind, entry, event)
        return
    error = mind.answers.get(event.ticket) or _why_not(mind, event)
    if error is not None:
        mind.refuse(event.ticket, error)
        return
    entry = _new_entry(mind, mind.holders[event.holder], event)
    mind.ledger.open(entry)
    mind.note_active(entry.capability)
    _queue(mind, entry, event)
    if event.attempt > 1:
        retried(mind, (event.holder, event.model))


def _asked_again(mind: Mind, entry: Entry, event: ev.Requested) -> None:
    if entry.state in (State.LOADING, State.RESIDENT):
        mind.say(_grant_of(entry))
    elif entry.state in (State.ASLEEP, State.DRAINING):
        if error := _why_no_wake(mind, entry):
            mind.say_no(entry.ticket, error)
        elif entry.ticket not in mind.line:
            _queue(mind, entry, event)
    elif entry.state is State.RECLAIMING:
        mind.refuse(entry.ticket, TicketClosed(entry.ticket))
    else:
        mind.stale_count += 1  # it waits already
    if entry.ticket in mind.line and event.priority < entry.priority:
        entry.priority = event.priority
        mind.line.hurry(entry.ticket, event.priority)


def recheck(mind: Mind) -> None:
    """The table has changed: who waits for a model that is no longer in it is refused."""
    for ticket in mind.line.tickets():
        entry = mind.ledger.find(ticket)
        assert entry is not None
        if entry.lease:
            continue
        try:
            mind.registry.find(entry.capability, entry.model)
        except (UnknownCapability, UnknownModel) as unknown:
            _turn_away(mind, entry, unknown)


def refuse_all(mind: Mind) -> None:
    for ticket in mind.line.tickets():
        entry = mind.ledger.find(ticket)
        assert entry is not None
        _turn_away(mind, entry, ArbiterClosing())


def _turn_away(mind: Mind, entry: Entry, error: RequestError) -> None:
    """Out of the line. A sleeper sleeps on and may ask again under the same ticket."""
    mind.line.drop(entry.ticket)
    mind.displaced.pop((entry.holder, entry.model), None)
    if entry.state is State.QUEUED:
        mind.refuse(entry.ticket, error)
        mind.close(entry)
    else:
        mind.say_no(entry.ticket, error)
        mind.watch(entry, mind.now)


def _why_no_wake(mind: Mind, entry: Entry) -> RequestError | None:
    if mind.closing_by is not None:
        return ArbiterClosing()
    if kept := kept_bytes(mind, entry.holder):
        return HolderQuarantined(entry.holder, kept)
    return floors.why_not(mind, entry.capability, entry.model)


def _why_not(mind: Mind, event: ev.Requested) -> RequestError | None:
    if mind.closing_by is not None:
        return ArbiterClosing()
    if event.lease:
        short = pressure.why_not(mind, event.holder, leases.LEASE)
        return short or leases.why_not(mind, event, event.lease) or _full(mind, event)
    try:
        mind.registry.find(event.capability, event.model)
    except (UnknownCapability, UnknownModel) as unknown:
        return unknown
    if error := floors.why_not(mind, event.capability, event.model):
        return error
    if event.holder not in mind.holders:
        return StaleEpoch(NEVER_JOINED, mind.epoch)
    if kept := kept_bytes(mind, event.holder):
        return HolderQuarantined(event.holder, kept)
    role = mind.registry.specs[event.capability].role
    short = pressure.why_not(mind, event.holder, role)
    return short or _cooling(mind, event) or _full(mind, event)


def _cooling(mind: Mind, event: ev.Requested) -> ModelCoolingDown | None:
    failure = mind.failures.get((event.capability, event.model))
    if failure is None or mind.now >= failure.until or event.attempt > 1:
        return None
    left = in_seconds(since(mind.now, failure.until))
    return ModelCoolingDown(event.model, failure.cause, left)


def _full(mind: Mind, event: ev.Requested) -> QueueFull | None:
    per_model, total = mind.settings.queue_per_model_count, mind.settings.queue_total_count
    label = model_label(event.capability, event.model)
    again = retry_after_s(mind, event.capability, event.model)
    if mind.line.count(label) >= per_model:
        return QueueFull(event.model, mind.line.count(label), per_model, again)
    if len(mind.line) >= total:
        return QueueFull("the arbiter", len(mind.line), total, again)
    return None


def model_label(capability: str, model: str) -> str:
    return f"{capability}/{model}"


def retry_after_s(mind: Mind, capability: str, model: str) -> float:
    """About one load of it, at least a second: a hint, not a promise."""
    return max(1.0, in_seconds(mind.estimates.slowest_load(capability, model)))


def _new_entry(mind: Mind, holder: Holder, event: ev.Requested) -> Entry:
    if event.lease:
        return leases.new_entry(mind, holder, event, event.lease)
    spec = mind.registry.find(event.capability, event.model)
    role = mind.registry.specs[event.capability].role
    floor = mind.floors.get((event.capability, event.model))
    return Entry(
        event.ticket, event.holder, holder.node, event.capability, event.model,
        event.settings_key, event.need, event.need_is_explicit, event.attempt,
        opened=mind.now, since=mind.now, role_rank=mind.policies.roles[role].rank,
        pinned=spec.pinned or floor is ev.Floor.DEVICE, keep_warm=spec.keep_warm,
        gang=event.gang, split=event.split,
    )  # fmt: skip


def _queue(mind: Mind, entry: Entry, event: ev.Requested) -> None:
    deadline = None if event.deadline is None else after(mind.now, event.deadline)
    label = model_label(entry.capability, entry.model)
    entry.priority = event.priority
    mind.line.add(entry.ticket, label, mind.now, deadline, event.priority)
    if deadline is not None:
        mind.watch(entry, deadline)
    priority = event.priority.name.lower()
    waiting = len(mind.line)
    mind.tell("ticket_queued", entry, position=waiting, attempt=entry.attempt, priority=priority)


# -- granting -------------------------------------------------------------------------------------


def admit(mind: Mind) -> None:
    """In the policy's order. A ticket that must wait keeps its device for itself: nobody behind it
    is granted there, so a large one cannot starve."""
    if not mind.is_settled or mind.closing_by is not None:
        return
    taken: set[DeviceId] = set()
    for ticket in mind.line.tickets():
        entry = mind.ledger.find(ticket)
        if entry is None:
            continue  # turned away with its gang
        if mind.is_silent(entry.holder):
            continue  # it keeps its place; a grant would only lie there
        if entry.state is State.QUEUED:
            _place(mind, entry, taken)
        elif entry.state is State.ASLEEP:
            _wake(mind, entry, taken)
        elif entry.state is State.RESIDENT:
            _back_in_service(mind, entry)


def _place(mind: Mind, entry: Entry, taken: set[DeviceId]) -> None:
    node = mind.nodes.get(entry.node)
    if node is None:
        return  # its agent has not introduced itself yet
    if entry.gang:
        return _place_gang(mind, entry, node, taken)
    books = compute_books(mind, node)
    need = size_of(mind, entry, max((b.budget_bytes for b in books), default=Bytes(0)))
    most = max((on_demand_of(b) for b in books), default=need)
    if need > most and (several := gangs.split(books, need, entry.split)):
        parts = [gangs.Part(entry, d, size) for d, size in several.items()]
        return _place_parts(mind, entry, node, parts, taken)
    if need > most:
        if entry.pinned:
            flag_pinned_on(mind, max(books, key=on_demand_of), need)
        _turn_away(mind, entry, NeverFits(entry.ticket, need, most))
        return
    _place_whole(mind, entry, node, need, taken)


def _place_whole(mind: Mind, entry: Entry, node: Node, need: Bytes, taken: set[DeviceId]) -> None:
    """On one device: where it is free, or where others make room for it."""
    sites = [
        Site(b.device, need, b.free_bytes)
        for b in compute_books(mind, node)
        if need <= on_demand_of(b)
        and b.device not in taken
        and is_trusted(mind, node, b.device)
        and not pressure.is_shut(mind, entry, b.device)
    ]
    sites.sort(key=mind.policies.place)
    if sites and sites[0].free_bytes >= need:
        _grant(mind, entry, {sites[0].device: need})
    elif sites and (late := preload.give_way(mind, entry)):
        _turn_away(mind, entry, late)
    elif sites:
        asked = (s.device for s in sites if make_room(mind, entry, s.device, need))
        taken.add(next(asked, sites[0].device))
        _look_again(mind, [s.device for s in sites])


def _place_gang(mind: Mind, entry: Entry, node: Node, taken: set[DeviceId]) -> None:
    """The first of its members to come up in the line asks for all of them."""
    if gone := [t for t in entry.gang if t in mind.answers]:
        return _turn_away(mind, entry, TicketClosed(gone[0]))
    there = gangs.members(mind, entry)
    if there is None or any(mind.line.is_ahead(e.ticket, entry.ticket) for e in there):
        return
    books = compute_books(mind, node)
    largest = max((b.budget_bytes for b in books), default=Bytes(0))
    sizes = [(e, size_of(mind, e, largest)) for e in there]
    most = {b.device: on_demand_of(b) for b in books}
    if not gangs.assign(sizes, books, most):
        need, whole = Bytes(sum(s for _, s in sizes)), Bytes(sum(most.values()))
        for member in there:
            _turn_away(mind, member, NeverFits(member.ticket, need, whole))
        return
    now = gangs.assign(sizes, books, {b.device: b.free_bytes for b in books})
    _place_parts(mind, entry, node, now or gangs.assign(sizes, books, most), taken)


def _place_parts(
    mind: Mind, entry: Entry, node: Node, parts: list[gangs.Part], taken: set[DeviceId]
) -> None:
    """All of them in this step, or none (SPEC A13)."""
    devices = {part.device for part in parts}
    entries = {part.entry.ticket: part.entry for part in parts}
    shut = any(pressure.is_shut(mind, p.entry, p.device) for p in parts)
    if devices & taken or shut or not all(is_trusted(mind, node, d) for d in devices):
        return
    if gangs.is_free(mind, parts):
        for ticket, member in entries.items():
            home = {p.device: p.size_bytes for p in parts if p.entry.ticket == ticket}
            _grant(mind, member, home)
        return
    gangs.make_room_for_all(mind, entry, parts)
    taken |= devices
    _look_again(mind, sorted(devices))


def _wake(mind: Mind, entry: Entry, taken: set[DeviceId]) -> None:
    """A sleeper wakes where its process lives."""
    node = mind.nodes.get(entry.node)
    if node is None or any(d in taken or not is_trusted(mind, node, d) for d in entry.home):
        return
    if any(pressure.is_shut(mind, entry, d) for d in entry.home):
        return
    missing = {d: Bytes(size - entry.charge(d)) for d, size in entry.home.items()}
    if all(mind.ledger.books[d].free_bytes >= size for d, size in missing.items()):
        entry.wakes_count += 1
        _grant(mind, entry, dict(entry.home))
        return
    for device in missing:
        most = on_demand_of(mind.ledger.books[device])
        if entry.home[device] > most:
            _turn_away(mind, entry, NeverFits(entry.ticket, entry.home[device], most))
            return
    for device, size in missing.items():
        make_room(mind, entry, device, size)
    taken.update(missing)
    _look_again(mind, list(missing))


def _grant(mind: Mind, entry: Entry, home: Sizes) -> None:
    """To LOADING. Whatever is granted already (the copy in host RAM of a sleeper) stays charged."""
    waited = since(entry.since, mind.now)
    mind.line.drop(entry.ticket)
    entry.home = home
    time_of = mind.estimates.wake_time if entry.wakes_count else mind.estimates.load_time
    entry.predicted = time_of(mind.key_of(entry))
    entry.load_by = after(mind.now, mind.settings.terms.load)
    entry.peak_bytes, entry.readings_count = Bytes(0), 0
    mind.move(entry, State.LOADING, granted={**entry.granted, **home})
    mind.watch(entry, entry.load_by)
    if entry.pinned:
        cap_pins(mind, home)
    mind.say(_grant_of(entry))
    mind.tell("ticket_granted", entry, size=entry.home_bytes, took=waited)
    if entry.need_is_explicit and entry.home_bytes > entry.need.device_bytes:
        said = entry.need.device_bytes
        mind.tell("explicit_too_low", entry, size=entry.home_bytes, explicit_bytes=said)
    if entry.lease:
        leases.begin(mind, entry)


def _grant_of(entry: Entry) -> Grant:
    devices = tuple(ev.DeviceBytes(d, size) for d, size in sorted(entry.home.items()))
    return Grant(entry.ticket, devices, entry.load_by, entry.predicted)


def _back_in_service(mind: Mind, entry: Entry) -> None:
    """It was to be woken, but never went to sleep."""
    mind.line.drop(entry.ticket)
    mind.say(_grant_of(entry))


def size_of(mind: Mind, entry: Entry, largest: Bytes) -> Bytes:
    """What it will be granted. What was learned, of a failure for memory or of a peak with its
    headroom, never exceeds the largest device: there is nothing beyond it to try, and the model
    has run there before."""
    estimate = mind.estimates.size(mind.key_of(entry), entry.need, entry.need_is_explicit)
    if estimate.source in ("corrected", "learned") and largest >= entry.need.device_bytes:
        return min(estimate.device_bytes, largest)
    return estimate.device_bytes


def _look_again(mind: Mind, devices: list[DeviceId]) -> None:
    """Minimum residency, refusals and urgency end by themselves; so does distrust of a device."""
    for device in devices:
        for entry in mind.ledger.books[device].entries.values():
            fades_at = urgency.fading(mind, entry) or mind.now
            for lawful_at in (min_residency_ends(mind, entry), entry.refused_until, fades_at):
                if lawful_at > mind.now:
                    mind.alarms.set(("line", ""), lawful_at)


def expire(mind: Mind, entry: Entry) -> None:
    """The time rule of the line: refuse what was not granted by its deadline."""
    waiting = mind.line.find(entry.ticket)
    if waiting is None or waiting.deadline is None:
        return
    if mind.now < waiting.deadline:
        mind.watch(entry, waiting.deadline)
        return
    waited = in_seconds(since(waiting.waiter.asked, mind.now))
    again = retry_after_s(mind, entry.capability, entry.model)
    _turn_away(mind, entry, DeadlineUnmet(entry.ticket, waited, again))
