"""What one decision of the core costs as everything around it grows (N2).

    python -m benchmarks.core_scale [--samples 500]

No Ray and no engine: events go straight into `Arbiter.handle`, each call timed alone; the functions
it calls are counted in other calls. Each node has one device, ten resident models of one holder and
one of another, and a hundred queued tickets. There are three sizes; the larger ones are measured
again with only as many devices touched as the smallest has; and there is one device with very many
residents.
"""

import argparse
import gc
import pickle
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.arbiter import Arbiter
from arbiter.core.decisions import Decision, Grant, Revoke
from arbiter.core.settings import DEFAULTS, Timeouts
from arbiter.core.types import Priority
from arbiter.units import GIB, SECOND, Bytes, DeviceId, Epoch, HolderId, Instant, NodeId, TicketId
from arbiter.units import seconds as span
from benchmarks import report
from policies import bundle

RESIDENT, QUEUED = 10, 100  # on each device
SIZES = (10, 100, 1_000)  # devices
RESIDENTS = (10, 100, 1_000, 10_000)  # residents of one device
QUIET = span(10**7)  # nothing times out meanwhile
PATIENT = replace(Timeouts(), silent=QUIET, lost=QUIET, reading=QUIET, bypass=QUIET, audit=QUIET)
ROOMY = replace(
    DEFAULTS,
    arena_fraction=1.0,
    wiggle_fraction=0.0,
    gpu_margin_bytes=Bytes(0),
    timeouts=PATIENT,
    queue_per_model_count=10**9,
    queue_total_count=10**9,
    carry_most=QUIET,
    bypass_count=10**9,
)
SEED = 7
COUNTED = 21  # times that the calls of each act are counted, for the median


@dataclass
class Scene:
    """A core with its nodes filled, and a clock."""

    devices: int
    residents: int
    queued: int
    now: int = SECOND
    rng: random.Random = field(default_factory=lambda: random.Random(SEED))
    counts_calls: bool = False
    held: dict[HolderId, tuple[ev.HeldTicket, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.core = Arbiter(ROOMY, bundle(ROOMY), Epoch(1), frozenset(), Instant(0))
        self.tickets = 0
        self.models = self.devices * self.residents
        specs = tuple(types.ModelSpec(f"m{n}", span(-1)) for n in range(self.models))
        specs += tuple(types.ModelSpec(f"single{n}", span(-1), True) for n in range(self.devices))
        self.feed(ev.CapabilitiesSet((types.CapabilitySpec("c", "text", "e", specs, span(60)),)))
        for n in range(self.devices):
            self._node(n)
        for n in range(self.devices):
            for _ in range(self.queued):
                self.ask(n, Priority.BATCH)
        gc.collect()
        gc.freeze()  # a walk over 100,000 tickets is no decision; the actor does not freeze

    def _node(self, n: int) -> None:
        node, device = NodeId(f"n{n}"), DeviceId(f"n{n}/gpu:0")
        total = Bytes((self.residents + 1) * 8 * GIB)
        self.feed(ev.NodeSeen(node, (types.DeviceSpec(device, types.DeviceKind.GPU, total),)))
        self.feed(ev.Measured(node, (ev.DeviceReading(device, total, Bytes(0)),), ()))
        for holder in ("h", "single"):
            self.feed(ev.Joined(HolderId(f"{holder}{n}"), node, "c", ()))
        for r in range(self.residents + 1):
            holder = "h" if r < self.residents else "single"
            model = f"m{n * self.residents + r}" if r < self.residents else f"single{n}"
            ticket = self.ask(n, Priority.HIGH, model, holder)
            self.feed(ev.Loaded(ticket, span(1)))
        for holder in ("h", "single"):
            self.held[HolderId(f"{holder}{n}")] = self._tickets(HolderId(f"{holder}{n}"))
            self.feed(self.beat(HolderId(f"{holder}{n}")))

    def feed(self, event: ev.Event) -> list[Decision]:
        self.now += SECOND // 1000
        return self.core.handle(event, Instant(self.now))

    def request(self, n: int, priority: Priority, model: str, holder: str = "h") -> ev.Requested:
        self.tickets += 1
        ticket = TicketId(f"t{self.tickets}")
        need = types.Need(Bytes(8 * GIB))
        return ev.Requested(
            ticket, HolderId(f"{holder}{n}"), "c", model, need, "", True, priority=priority
        )

    def ask(
        self, n: int, priority: Priority, model: str | None = None, holder: str = "h"
    ) -> TicketId:
        request = self.request(n, priority, model or f"m{self.rng.randrange(self.models)}", holder)
        self.feed(request)
        return request.ticket

    def _tickets(self, holder: HolderId) -> tuple[ev.HeldTicket, ...]:
        return tuple(
            ev.HeldTicket(
                e.id,
                e.model,
                types.Phase.RESIDENT,
                0,
                span(0),
                tuple(types.DeviceBytes(d, b) for d, b in e.home.items()),
                e.need,
                "",
                Priority.HIGH,
                uses_count=1,
            )
            for e in self.core._state.ledger.holding(holder).values()
        )

    def beat(self, holder: HolderId) -> ev.Renewed:
        """Made of strings of its own, as a message that came over the network."""
        made: ev.Renewed = pickle.loads(pickle.dumps(ev.Renewed(holder, self.held[holder])))
        return made

    def timed(self, event: ev.Event) -> tuple[float, list[Decision]]:
        """Microseconds of this thread in one call; what others do on the machine is not in it.
        While calls are counted: how many functions it called, which no machine changes."""
        self.now += SECOND // 1000
        if self.counts_calls:
            return self._counted(event)
        began = time.thread_time_ns()
        decisions = self.core.handle(event, Instant(self.now))
        return (time.thread_time_ns() - began) / 1e3, decisions

    def _counted(self, event: ev.Event) -> tuple[float, list[Decision]]:
        called = 0

        def note(_frame: object, what: str, _about: object) -> None:
            nonlocal called
            called += what in ("call", "c_call")

        sys.setprofile(note)
        try:
            decisions = self.core.handle(event, Instant(self.now))
        finally:
            sys.setprofile(None)
        return called, decisions


def renew(scene: Scene, n: int) -> float:
    """A heartbeat that repeats one ticket, nothing changed."""
    return scene.timed(scene.beat(HolderId(f"single{n}")))[0]


def renew_all(scene: Scene, n: int) -> float:
    """A heartbeat that repeats those of a holder with all others on the device."""
    return scene.timed(scene.beat(HolderId(f"h{n}")))[0]


def queue(scene: Scene, n: int) -> float:
    """A request that must wait behind those that wait."""
    request = scene.request(n, Priority.BATCH, f"m{scene.rng.randrange(scene.models)}")
    took_us, decisions = scene.timed(request)
    assert not any(isinstance(d, Grant | Revoke) for d in decisions)
    scene.feed(ev.Withdrawn(request.ticket))
    return took_us


def grant_with_victims(scene: Scene, n: int) -> float:
    """Minimum residency is over: an urgent request takes the cheapest set of victims."""
    request = scene.request(n, Priority.URGENT, f"m{scene.rng.randrange(scene.models)}")
    took_us, decisions = scene.timed(request)
    [revoke] = [d for d in decisions if isinstance(d, Revoke)]
    scene.feed(ev.BarrierDropped(revoke.ticket, 0))
    scene.feed(ev.Withdrawn(request.ticket))
    for other in scene.core._state.ledger.held_by(
        HolderId(f"h{n}")
    ):  # the victim that was tried next
        if other.state.value == "draining":
            scene.feed(ev.BarrierDropped(other.id, 0))
        other.declined_until = Instant(0)
    return took_us


def grant_when_back(scene: Scene, n: int) -> float:
    """The second half: the victim's bytes are seen back. All tickets that wait are bypassed."""
    request = scene.request(n, Priority.URGENT, f"m{scene.rng.randrange(scene.models)}")
    [revoke] = [d for d in scene.feed(request) if isinstance(d, Revoke)]
    scene.feed(ev.Released(revoke.ticket, "swap"))
    took_us, decisions = scene.timed(ev.EngineGone(NodeId(f"n{n}"), revoke.ticket, True))
    assert any(isinstance(d, Grant) for d in decisions)
    scene.feed(ev.Loaded(request.ticket, span(1)))
    scene.held[request.holder] = scene._tickets(request.holder)
    scene.feed(scene.beat(request.holder))
    return took_us


ACTS: dict[str, Callable[[Scene, int], float]] = {
    "renew": renew,
    "renew_all": renew_all,
    "queue": queue,
    "grant_with_victims": grant_with_victims,
    "grant_when_back": grant_when_back,
}


def measure(scene: Scene, samples: int, among: Sequence[int]) -> dict[str, dict[str, float]]:
    """On random ones of these devices."""
    figures = {}
    for name, act in ACTS.items():
        took = sorted(act(scene, scene.rng.choice(among)) for _ in range(samples))
        p50, p99 = took[len(took) // 2], took[len(took) * 99 // 100]
        figures[name] = {"p50_us": round(p50, 1), "p99_us": round(p99, 1)}
        scene.counts_calls = True
        calls = sorted(act(scene, scene.rng.choice(among)) for _ in range(COUNTED))
        scene.counts_calls, figures[name]["calls"] = False, calls[COUNTED // 2]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--residents", type=int, nargs="*", default=RESIDENTS)
    args = parser.parse_args()
    figures: dict[str, object] = {}
    for devices in args.sizes:
        scene = Scene(devices, RESIDENT, QUEUED)
        name = f"{devices} devices, {scene.models} models, {devices * QUEUED} tickets in line"
        figures[name] = measure(scene, args.samples, range(devices))
        print(name, figures[name], flush=True)
        if devices > args.sizes[0]:  # as much around it, but the processor's caches hold it
            few = scene.rng.sample(range(devices), args.sizes[0])
            figures[f"{name}; {len(few)} touched"] = sample = measure(scene, args.samples, few)
            print(f"{len(few)} of them touched", sample, flush=True)
    for residents in args.residents:
        scene = Scene(1, residents, QUEUED)
        sample = measure(scene, args.samples, range(1))
        figures[f"one device with {residents} residents"] = sample
        print(f"one device with {residents} residents", sample, flush=True)
    report.write("core_scale", figures, seed=SEED)


if __name__ == "__main__":
    main()
