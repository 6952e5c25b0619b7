"""The mixed hour of eight capabilities in 40 % of the memory they need (N5), in virtual time: how
long tickets wait, beside what they were told as they joined.

Engines share two cores: what a load or a request takes grows with what runs beside it, and each
load takes longer or shorter by chance. Sizes and seconds are those of `benchmarks.one_card`.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import EventKind, LogEvent
from arbiter.replay.demand import Demand, PackedRequests, Seat, Use
from arbiter.replay.world import HolderState, SimulatedHolder, World
from arbiter.units import (
    SECOND,
    Bytes,
    DeviceId,
    Instant,
    NodeId,
    Span,
    TicketId,
    in_seconds,
    seconds,
    since,
)
from benchmarks.one_card.hour import BATCH_BEGINS, BATCH_REQUESTS, Hour
from benchmarks.replay.table import SETTINGS
from policies import bundle

NODE, LENGTH_S, SHARE = NodeId("n"), 180.0, 0.4
CORES_COUNT = 2
SPREAD = 0.4  # of the logarithm of a load's seconds
CALL_AFTER_S = 1.5  # between the calls of one voice turn
BOUND_S = in_seconds(SETTINGS.collate_most)  # what a wait may be that C13 bounds
BEGIN_S = 100.0  # before then each model is loaded once, so that its seconds are known


@dataclass(frozen=True, slots=True)
class Engine:
    """What one model needs, and takes on an idle machine."""

    size_mb: int
    load_s: float
    busy_s: float


ENGINES = {
    "tts": Engine(285, 0.35, 0.8),
    "chat": Engine(433, 0.9, 0.7),
    "embedding": Engine(183, 0.65, 0.1),
    "rerank": Engine(313, 1.8, 0.4),
    "vision": Engine(256, 1.0, 0.8),
    "asr": Engine(192, 0.4, 0.5),
    "vad": Engine(52, 0.1, 0.1),
    "image": Engine(103, 0.5, 0.9),
}
NAMES = tuple(ENGINES)


@dataclass(frozen=True, slots=True)
class Wait:
    """How long one ticket waited until it served, and what it was told as it joined."""

    model: str
    at_s: float
    waited_s: float
    told_s: float

    @property
    def ratio(self) -> float:
        return self.waited_s / max(self.told_s, 0.001)


class MixedHourWorld(World):
    """Notes waits, tells the core how long requests ran, and lets what runs at once share the
    cores."""

    def __init__(self, seed: int) -> None:
        super().__init__(demand(seed), SETTINGS, bundle(SETTINGS))
        self._dice = random.Random(seed)
        self._told: dict[TicketId, tuple[Instant, Span]] = {}
        self._runs: dict[TicketId, list[Span]] = {}
        self.waits: list[Wait] = []

    def _feed(self, event: ev.Event) -> None:
        if isinstance(event, ev.Renewed):
            event = replace(event, runs=tuple(self._finished(event)))
        for decision in self.core.handle(event, self.now):
            if isinstance(decision, LogEvent):
                self._note(decision)
            self._perform(decision)

    def _finished(self, event: ev.Renewed) -> Iterator[ev.FinishedRequest]:
        for held in event.tickets:
            for ran in self._runs.pop(held.ticket, ()):
                yield ev.FinishedRequest(held.ticket, held.model, ran, "answered", "", ran)

    def _note(self, told: LogEvent) -> None:
        if told.ticket is None:
            return
        if told.kind is EventKind.TICKET_WAITS and self.now >= seconds(BEGIN_S):
            assert told.took is not None
            self._told.setdefault(told.ticket, (self.now, told.took))
        elif told.kind is EventKind.MODEL_LOAD and told.ticket in self._told:
            began, said = self._told.pop(told.ticket)
            waited = in_seconds(since(began, self.now))
            model = str(told.data["model"])
            self.waits.append(Wait(model, began / SECOND, waited, in_seconds(said)))

    def _slowed(self) -> float:
        """Says how much longer one more process takes beside those that run."""
        loads = sum(s.state is HolderState.LOADING for s in self._simulated)
        runs = sum(s.busy_until > self.now for s in self._simulated)
        return max(1.0, (loads + runs + 1) / CORES_COUNT)

    def _granted(self, simulated: SimulatedHolder, devices: tuple[types.DeviceBytes, ...]) -> None:
        seat = simulated.seat
        load_s = (
            ENGINES[seat.capability].load_s * self._slowed() * self._dice.lognormvariate(0, SPREAD)
        )
        simulated.seat = replace(seat, load=seconds(load_s))
        super()._granted(simulated, devices)

    def _use(self, simulated: SimulatedHolder, busy: Span) -> None:
        ran = Span(round(busy * self._slowed()))
        self._runs.setdefault(simulated.ticket, []).append(ran)
        super()._use(simulated, ran)


def demand(seed: int) -> Demand:
    """Everything that is asked in three minutes, and a card with too little room."""
    seats = tuple(
        Seat(
            name,
            name,
            NODE,
            types.Need(Bytes(e.size_mb * 10**6)),
            seconds(e.load_s),
            unload=seconds(0.1),
        )
        for name, e in ENGINES.items()
    )
    card = Bytes(round(SHARE * sum(seat.need.device_bytes for seat in seats)))
    device = types.DeviceSpec(DeviceId("n/cpu:0"), types.DeviceKind.CPU, card)
    specs = tuple(
        types.CapabilitySpec(n, "text", "e", (types.ModelSpec(n, seconds(60)),), seconds(300))
        for n in NAMES
    )
    return Demand(
        (ev.NodeSeen(NODE, (device,)),),
        ev.CapabilitiesSet(specs),
        seats,
        PackedRequests(_uses(seed)),
    )


def _uses(seed: int) -> Iterator[Use]:
    for number, name in enumerate(NAMES):
        yield _use(number * BEGIN_S / len(NAMES), name)
    hour = Hour(seed, LENGTH_S, {name: name for name in NAMES}, b"")
    for item in hour.items():
        for number, (capability, _, _) in enumerate(item.calls):
            yield _use(BEGIN_S + item.at_s + number * CALL_AFTER_S, capability)
    for number in range(BATCH_REQUESTS):
        yield _use(BEGIN_S + BATCH_BEGINS * LENGTH_S + number / 2, "chat")


def _use(at_s: float, name: str) -> Use:
    return Use(Instant(seconds(at_s)), NAMES.index(name), seconds(ENGINES[name].busy_s))


def waits_of(seed: int) -> list[Wait]:
    """Plays the hour of one seed once."""
    world = MixedHourWorld(seed)
    world.run()
    return world.waits
