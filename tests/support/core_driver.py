"""Drives an arbiter in seconds and GiB, one event at a time.

    driver = CoreDriver(device=80)              # node `n` has 80 GiB, holder `h` has joined
    driver.resident(0, "a", 50)                 # at 0 s: ticket `a` of 50 GiB for model `a` serves
    decisions = driver.ask(20, "b", 40)         # at 20 s: ticket `b` asks
    assert revoked(decisions) == [("a", "swap", "gone")]

A ticket is named for its model; `a2` is a second ticket for model `a`. Every method that feeds an
event returns the decisions that act: log events, estimates of the wait and timers are kept in
`logged`, `queued` and `timers`. Heartbeats and readings are patient here (hours), so that a
scenario names only what it is about; tests of silence pass the real terms.
"""

from dataclasses import replace

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.arbiter import Arbiter
from arbiter.core.decisions import (
    Decision,
    Grant,
    KillEngine,
    LogEvent,
    Queued,
    Refuse,
    Revoke,
    SetTimer,
)
from arbiter.core.settings import DEFAULTS, Settings, Timeouts
from arbiter.errors import RequestError
from arbiter.units import (
    GIB,
    SECOND,
    Bytes,
    DeviceId,
    Epoch,
    HolderId,
    Instant,
    NodeId,
    Span,
    TicketId,
    seconds,
)
from policies import bundle
from tests.support.core_queries import CPU, CoreQueries

NODE = NodeId("n")
HOST = DeviceId("n/host")
PATIENT = replace(
    Timeouts(),
    silent=seconds(3600),
    reading=seconds(3600),
    lost=seconds(7200),
    lease_lapse=seconds(7200),
)
PLAIN = replace(
    DEFAULTS,
    arena_fraction=1.0,  # so that a device of 80 lends 80
    wiggle_fraction=0.0,
    gpu_margin_bytes=Bytes(0),
    learned_headroom_fraction=0.0,
    timeouts=PATIENT,
)
MODELS = "a b c d e large small text vad".split()


def s(t: float) -> Instant:
    return Instant(round(t * SECOND))


def gib(size: float) -> Bytes:
    return Bytes(round(size * GIB))


def listed(sizes: dict[DeviceId, float]) -> tuple[types.DeviceBytes, ...]:
    return tuple(types.DeviceBytes(device, gib(size)) for device, size in sizes.items())


def capability(
    name: str, role: str, models: tuple[str, ...], keep_warm_s: float = -1, pinned: str = ""
) -> types.CapabilitySpec:
    specs = tuple(types.ModelSpec(m, seconds(keep_warm_s), m == pinned) for m in models)
    return types.CapabilitySpec(name, role, "fake", specs, seconds(300))


class CoreDriver(CoreQueries):
    """An arbiter with the capabilities `text` and `embedding` on node `n`.

    `device`, `host`: GiB of its device `n/cpu:0` and of its RAM for sleeping weights. `known`: the
    holders of the last epoch. `keep_warm_s`: of every model; negative: without end. `pinned`: a
    model. `read`: False leaves out the first reading, so that nothing is known of the device."""

    def __init__(
        self,
        device: float = 80,
        host: float = 0,
        settings: Settings = PLAIN,
        *,
        known: tuple[str, ...] = (),
        keep_warm_s: float = -1,
        pinned: str = "",
        holders: tuple[str, ...] = ("h",),
        read: bool = True,
    ) -> None:
        super().__init__(
            Arbiter(
                settings, bundle(settings), Epoch(1), frozenset(map(HolderId, known)), Instant(0)
            )
        )
        self.logged: list[LogEvent] = []
        self.timers: list[Instant] = []
        self.queued: list[Queued] = []
        self.engines: dict[str, dict[DeviceId, float]] = {}
        self.inexact: set[str] = set()
        self.stalls = 0.0
        self.slabs: tuple[ev.SlabReading, ...] = ()
        self.sizes: dict[str, float] = {}
        self.host_sizes: dict[str, float] = {}
        self.foreign: dict[DeviceId, float] = {}
        self.physical: dict[DeviceId, float] = {}  # free; plenty where nothing is said
        text = capability("text", "text", tuple(MODELS), keep_warm_s, pinned)
        embedding = capability("embedding", "embedding", ("e1", "e2"), keep_warm_s, pinned)
        self.table = (text, embedding)
        self.at(0, ev.CapabilitiesSet(self.table))
        self.see_node(0, device, host)
        if read:
            self.read(0)
        for holder in holders:
            self.join(0, holder)

    # -- feeding -------------------------------------------------------------------------------

    def at(self, t: float, event: ev.Event) -> list[Decision]:
        """Feeds an event at `t` seconds. Returns the decisions that act; the others are kept."""
        decisions = self.arbiter.handle(event, s(t))
        self.logged += [d for d in decisions if isinstance(d, LogEvent)]
        self.timers = [d.at for d in decisions if isinstance(d, SetTimer)]
        self.queued = [d for d in decisions if isinstance(d, Queued)]
        return [d for d in decisions if not isinstance(d, LogEvent | Queued | SetTimer)]

    def fire_timer(self, t: float) -> list[Decision]:
        return self.at(t, ev.TimerFired())

    def sleep_until(self, t: float) -> None:
        """Fires each timer that the arbiter sets for a time before that moment."""
        while self.timers and self.timers[0] < s(t):
            self.fire_timer(self.timers[0] / SECOND)

    def see_node(self, t: float, device: float, host: float, node: str = "n") -> None:
        specs = [types.DeviceSpec(DeviceId(f"{node}/cpu:0"), types.DeviceKind.CPU, gib(device))]
        specs.append(types.DeviceSpec(DeviceId(f"{node}/host"), types.DeviceKind.HOST, gib(host)))
        self.at(t, ev.NodeSeen(NodeId(node), tuple(specs)))

    def read(self, t: float, node: str = "n") -> list[Decision]:
        """The agent reports a reading of the node, as `engines`, `foreign` and `physical` say."""
        names = (DeviceId(f"{node}/cpu:0"), DeviceId(f"{node}/host"))
        devices = tuple(
            ev.DeviceReading(d, gib(self.physical.get(d, 1e6)), gib(self.foreign.get(d, 0)))
            for d in names
        )
        engines = tuple(
            ev.EngineReading(TicketId(ticket), listed(sizes), ticket not in self.inexact)
            for ticket, sizes in self.engines.items()
        )
        return self.at(t, ev.Measured(NodeId(node), devices, engines, self.stalls, (), self.slabs))

    def join(
        self, t: float, holder: str, *held: ev.HeldTicket, node: str = "n", capability: str = "text"
    ) -> list[Decision]:
        return self.at(t, ev.Joined(HolderId(holder), NodeId(node), capability, held))

    def ask(
        self, t: float, name: str, size: float, *, holder: str = "h", model: str = "",
        host: float = 0, capability: str = "text", deadline_s: float | None = None,
        attempt: int = 1, explicit: bool = True, priority: types.Priority = types.Priority.NORMAL,
        tenant: str = "default", client: str = "", least: float = 0,
    ) -> list[Decision]:  # fmt: skip
        """Requests the ticket `name` for `size` GiB on the device and `host` GiB asleep."""
        self.sizes[name], self.host_sizes[name] = size, host
        need = types.Need(gib(size), host_bytes=gib(host), least_bytes=gib(least))
        deadline = None if deadline_s is None else seconds(deadline_s)
        return self.at(t, ev.Requested(
            TicketId(name), HolderId(holder), capability, model or name.rstrip("0123456789"),
            need, "", explicit, deadline, attempt, priority, client=types.Client(tenant, client),
        ))  # fmt: skip

    def lease(
        self, t: float, name: str, size: float, *, tenant: str = "t", preemptible: bool = False,
        term_s: float = 3600, notice_s: float = 5, joined: bool = False, node: str = "n",
    ) -> list[Decision]:  # fmt: skip
        """Requests a lease of `size` GiB; before that its process joins, unless it has."""
        holder = HolderId(f"lease:{name}")
        if not joined:
            self.at(t, ev.Joined(holder, NodeId(node), "lease", ()))
        self.sizes[name] = size
        terms = types.LeaseConditions(tenant, seconds(term_s), seconds(notice_s), preemptible)
        need = types.Need(gib(size))
        return self.at(t, ev.Requested(TicketId(name), holder, "lease", name, need, lease=terms))

    def resident(self, t: float, name: str, size: float, **how: object) -> None:
        """Has a ticket granted, loaded in no time, and idle; `how` as for `ask`."""
        assert is_granted(self.ask(t, name, size, **how), name)  # type: ignore[arg-type]
        assert self.at(t, ev.Loaded(TicketId(name), seconds(0))) == []
        self.beat(t, name, holder=str(how.get("holder", "h")))

    def beat(self, t: float, *names: str, holder: str = "h", inflight: int = 0) -> list[Decision]:
        """Renews every ticket of a holder; those of `names` have `inflight` requests in flight."""
        held = tuple(
            self.held(e.id, inflight=inflight if e.id in names else e.inflight, t=t)
            for e in self.tickets_of(holder)
            if e.state.value in ("loading", "resident", "draining", "asleep")
        )
        return self.at(t, ev.Renewed(HolderId(holder), held))

    def held(
        self, name: str, phase: types.Phase | None = None, inflight: int = 0, t: float = 0,
        model: str = "", size: float | None = None, idle_s: float | None = None,
    ) -> ev.HeldTicket:  # fmt: skip
        """What a holder says of a ticket: by default what the arbiter believes."""
        ticket = self.find(name)
        phase = phase or (types.Phase(ticket.state.value) if ticket else types.Phase.RESIDENT)
        idle = Span(s(t) - ticket.last_used if ticket and not ticket.inflight else 0)
        idle = idle if idle_s is None else seconds(idle_s)
        size = self.sizes.get(name, size or 0) if size is None else size
        home = (types.DeviceBytes(CPU, gib(size)),)
        need = types.Need(gib(size), host_bytes=gib(self.host_sizes.get(name, 0)))
        model = model or name.rstrip("0123456789")
        priority = ticket.priority if ticket else types.Priority.NORMAL
        return ev.HeldTicket(
            TicketId(name), model, phase, inflight, idle, home, need, "", priority,
            uses_count=ticket.uses_count if ticket else 0,
            client=ticket.client if ticket else types.ANYBODY,
        )  # fmt: skip

    def gone(self, t: float, name: str, bytes_back: bool = True) -> list[Decision]:
        """The agent reports the end of a ticket's engine."""
        self.engines.pop(name, None)
        return self.at(t, ev.EngineGone(NODE, TicketId(name), bytes_back))

    # -- looking -------------------------------------------------------------------------------

    def kinds(self) -> list[str]:
        return [t.kind for t in self.logged]

    def last(self, kind: str) -> LogEvent:
        return next(t for t in reversed(self.logged) if t.kind == kind)


def is_granted(decisions: list[Decision], name: str) -> bool:
    return any(isinstance(d, Grant) and d.ticket == name for d in decisions)


def granted(decisions: list[Decision]) -> list[str]:
    return [d.ticket for d in decisions if isinstance(d, Grant)]


def revoked(decisions: list[Decision]) -> list[tuple[str, str, str]]:
    """Ticket, reason, and the tier it goes to."""
    return [(d.ticket, d.reason.value, d.to.value) for d in decisions if isinstance(d, Revoke)]


def killed(decisions: list[Decision]) -> list[str]:
    return [d.ticket for d in decisions if isinstance(d, KillEngine)]


def refusal(decisions: list[Decision]) -> RequestError:
    [error] = [d.error for d in decisions if isinstance(d, Refuse)]
    return error
