"""Nodes, holders and a lossy wire in virtual time, driven by one seed, around the real core.

The world keeps its own truth that the arbiter cannot see: the bytes each engine really holds. The
safety check is that this truth never exceeds a device's budget, whatever is delayed, repeated,
lost or killed, except by what an under-reporting child itself takes beyond its grant.
"""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from operator import methodcaller

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.arbiter import Arbiter
from arbiter.core.decisions import (
    EventKind,
    Grant,
    KillEngine,
    LoadModel,
    LogEvent,
    Refuse,
    RequestReading,
    Revoke,
    SetTimer,
    WithdrawLoad,
)
from arbiter.core.settings import DEFAULTS, Settings, TenantLimits, Timeouts, Watermarks
from arbiter.units import (
    GIB,
    SECOND,
    Bytes,
    DeviceId,
    Epoch,
    HolderId,
    Instant,
    NodeId,
    TicketId,
    host_device,
    seconds,
)
from policies import bundle
from tests.sim.actors import Caller, Holder, ToHolder
from tests.sim.agents import Agent
from tests.sim.interventions import EVENING, EXTRA, EXTRA_MODEL, NIGHT, Interventions
from tests.sim.lease_holders import LeaseHolder, size_of

# The real times, except that a barrier and a hanging load are shorter: less virtual time a seed.
TERMS = replace(Timeouts(), barrier=seconds(4), load=seconds(15), lost=seconds(20))
SETTINGS = replace(
    DEFAULTS, arena_fraction=1.0, wiggle_fraction=0.0, gpu_margin_bytes=Bytes(0), timeouts=TERMS,
    carry_most=seconds(20), preload="history", habit_least_count=1, habit_fraction=0.0,
    batch_hours=EVENING,
)  # fmt: skip
TENANTS = (
    TenantLimits("bounded", Bytes(60 * GIB)),
    TenantLimits("keeper", None, Bytes(15 * GIB)),
    TenantLimits("spent", None, Bytes(0), Bytes(10 * GIB)),
)
MODELS, PINNED, OVERSIZE, NIGHTLY = "abcdefg", "f", "g", "d"
# Each draws its own odds, in this order.
FAULTS = {
    "lose": "A message is lost.",
    "repeat": "A message arrives twice.",
    "slow": "A message takes up to 2 s, or memory comes back 7 s after its process died.",
    "stuck": "A dead engine's memory does not come back until the faults stop.",
    "oom": "A load fails for want of memory.",
    "broken": "A load fails for another cause.",
    "hang": "A load, an engine without its holder, or a leased process does not end in time.",
    "rogue": "An engine takes more than it was granted.",
    "wedged": "A holder says for ever that it unloads.",
    "liar": "A holder says that a model sleeps, and no byte has fallen.",
    "unannounced": "A holder dies, and the arbiter is not told.",
}
KINDS = (types.DeviceKind.CPU, types.DeviceKind.GPU)


class World:
    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.now = Instant(0)
        limited = TENANTS if self.rng.random() < 0.4 else ()
        marks = Watermarks() if self.rng.random() < 0.3 else None
        self.settings = self.vary(replace(SETTINGS, tenants=limited, device_marks=marks))
        self.faults = True
        self.agenda: list[tuple[int, int, Callable[[], None]]] = []
        self.order = itertools.count()
        # Swarm: each seed draws its own odds, so that some runs are only crashes, some only delay.
        self.odds = {name: self.rng.choice([0.0, 0.05, 0.25]) for name in FAULTS}
        self.odds["long"] = self.rng.choice([0.0, 0.3])
        self.kills: Counter[str] = Counter()
        self.told: Counter[str] = Counter()
        self.dead_nodes: set[NodeId] = set()
        self.known: set[HolderId] = set()  # what the shell keeps on disk
        self.kept: tuple[Callable[[Arbiter], None], ...] = ()  # as well
        self.epoch = Epoch(0)
        self.arbiter: Arbiter | None = None
        self.armed: Instant | None = None
        self.holders: dict[HolderId, Holder] = {}
        self.names = itertools.count()
        self.role = self.rng.choice(["text", "embedding"])  # pressure spares the one
        sleeps = self.rng.random() < 0.7
        self.needs = {m: self._need(sleeps) for m in (*MODELS, EXTRA_MODEL)}
        self.needs[PINNED] = types.Need(Bytes(3 * GIB))  # leaves room for each of the others
        self.needs[OVERSIZE] = types.Need(Bytes(90 * GIB))  # more than any device has
        self.interventions = Interventions(self)
        self.agents = {n: self._agent(n) for n in (NodeId("n0"), NodeId("n1"))}
        self.budgets = {s.device: int(s.total_bytes) for a in self.agents.values() for s in a.specs}
        self.restart_arbiter()
        for agent in self.agents.values():
            self.later(1.0, agent.beat)
            for _ in range(2):
                self.new_holder(agent)

    # -- making --------------------------------------------------------------------------------

    def vary(self, settings: Settings) -> Settings:
        """Returns the settings of this world."""
        return settings

    def _need(self, sleeps: bool) -> types.Need:
        weights = self.rng.randint(5, 55) * GIB
        host = weights if sleeps and self.rng.random() < 0.7 else 0
        return types.Need(Bytes(weights), host_bytes=Bytes(host))

    def _agent(self, node: NodeId) -> Agent:
        kind = self.rng.choice(KINDS)
        count = 1 if kind is types.DeviceKind.CPU else self.rng.randint(1, 2)
        sizes = [80, 65][:count]
        specs = [
            types.DeviceSpec(DeviceId(f"{node}/{kind.value}:{i}"), kind, Bytes(size * GIB))
            for i, size in enumerate(sizes)
        ]
        host = Bytes(self.rng.choice([0, 60, 200]) * GIB)
        specs.append(types.DeviceSpec(host_device(node), types.DeviceKind.HOST, host))
        return Agent(self, node, tuple(specs))

    def new_holder(self, agent: Agent) -> None:
        holder = Holder(self, HolderId(f"h{next(self.names)}"), agent)
        holder.is_driver = self.rng.random() < 0.25
        holder.capability = EXTRA if self.rng.random() < 0.25 else "text"
        self.holders[holder.holder] = holder
        self.later(1.0, holder.beat)

    def new_lease_holder(self) -> None:
        """A process outside Serve wants memory for a while."""
        agent = self.rng.choice(list(self.agents.values()))
        may_interrupt = self.rng.random() < 0.5
        tenant = self.rng.choice(["t", "bounded", "keeper"])
        terms = types.LeaseConditions(
            tenant, seconds(self.rng.uniform(5, 40)), seconds(3), may_interrupt
        )
        size = size_of(self.rng.randrange(3))
        job = LeaseHolder(
            self, HolderId(f"j{next(self.names)}"), agent, size_bytes=size, terms=terms
        )
        self.holders[job.holder] = job
        self.later(1.0, job.beat)

    def table(self) -> ev.CapabilitiesSet:
        specs = tuple(
            types.ModelSpec(
                m, seconds(-1 if m == "a" else 20), m == PINNED, allow_oversize=m == OVERSIZE,
                hours=NIGHT * (m == NIGHTLY),
            )
            for m in MODELS if m not in self.interventions.removed
        )  # fmt: skip
        spec = types.CapabilitySpec("text", self.role, "fake", specs, seconds(60))
        return ev.CapabilitiesSet((spec,))

    # -- time ----------------------------------------------------------------------------------

    def at(self, when: int, action: Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (when, next(self.order), action))

    def later(self, max_s: float, action: Callable[[], None], exactly: bool = False) -> None:
        wait_s = max_s if exactly else self.rng.uniform(0.001, max_s)
        self.at(self.now + int(wait_s * SECOND), action)

    def delay(self) -> int:
        return int(self.rng.uniform(0.0005, 2.0 if self.chance("slow") else 0.1) * SECOND)

    def chance(self, name: str) -> bool:
        return (self.faults or name == "long") and self.rng.random() < self.odds[name]

    def run(self, until_s: float) -> None:
        until = int(until_s * SECOND)
        while self.agenda and self.agenda[0][0] <= until:
            at, _, action = heapq.heappop(self.agenda)
            self.now = Instant(max(self.now, at))
            action()
            self.check_safety()
        self.now = Instant(until)

    # -- truth ---------------------------------------------------------------------------------

    def physical(self, device: DeviceId) -> int:
        agent = self.agents[NodeId(device.split("/", maxsplit=1)[0])]
        return sum(e.held.get(device, 0) for e in agent.engines.values())

    def check_safety(self) -> None:
        """Asked after every action, so plain sums: counters took a third of a run."""
        for agent in self.agents.values():
            held: dict[DeviceId, int] = {}
            for engine in agent.engines.values():
                for device, size in engine.held.items():
                    held[device] = held.get(device, 0) + size
                for device, size in engine.extra.items():
                    held[device] = held.get(device, 0) - size
            for device, size in held.items():
                assert size <= self.budgets[device], (
                    f"{device} holds {size / GIB} GiB of {self.budgets[device] / GIB}"
                    f" at {self.now / SECOND} s"
                )

    def note(self, told: LogEvent) -> None:
        """What is forgotten must be in no table, nor registered from Python."""
        self.told[told.kind] += 1
        if told.kind is not EventKind.MODEL_REMOVED:
            return
        specs = (*self.table().capabilities, *self.interventions.registered)
        known = {(spec.name, model.name) for spec in specs for model in spec.models}
        name = (told.data["capability"], told.data["model"])
        assert name not in known, f"{name} is forgotten, but it is known at {self.now / SECOND} s"

    # -- the wire ------------------------------------------------------------------------------

    def from_holder(self, holder: Holder, epoch: Epoch | None, event: ev.Event) -> None:
        if self.chance("lose"):
            return
        for _ in range(1 + self.chance("repeat")):
            self.at(self.now + self.delay(), lambda: self.on_holder_message(holder, epoch, event))

    def on_holder_message(self, holder: Holder, epoch: Epoch | None, event: ev.Event) -> None:
        if self.arbiter is None:
            return
        if isinstance(event, ev.Joined):
            if holder.alive:
                self.known.add(holder.holder)
                holder.epoch = self.epoch
                self.feed(event)
        elif epoch != self.epoch or not self.arbiter.has_joined(holder.holder):
            if epoch is not None and holder.epoch == epoch:
                holder.join()  # the shell answers StaleEpoch
        else:
            self.feed(event)

    def on_agent_message(self, agent: Agent, epoch: Epoch | None, event: ev.Event) -> None:
        if self.arbiter is None or agent.node in self.dead_nodes:
            return
        if epoch == self.epoch:
            self.feed(event)
        elif agent.epoch != self.epoch:
            agent.epoch = self.epoch
            self.feed(agent.introduction())

    def feed(self, event: ev.Event) -> None:
        assert self.arbiter is not None
        for decision in self.arbiter.handle(event, self.now):
            match decision:
                case Grant(ticket, _) | Refuse(ticket, _):
                    self.to_holder(HolderId(ticket.split(".", maxsplit=1)[0]), decision)
                case Revoke(_, holder) | LoadModel(holder, _) | WithdrawLoad(holder, _):
                    self.to_holder(holder, decision)
                case KillEngine(node, ticket):
                    self.to_agent(node, methodcaller("reap", ticket))
                case RequestReading(node):
                    self.to_agent(node, methodcaller("read"))
                case LogEvent():
                    self.note(decision)
                case SetTimer(at):
                    self.arm(at)

    def check_grant(self, agent: Agent, ticket: TicketId) -> types.GrantCheck | None:
        """None: the arbiter is away, or the question or its answer was lost."""
        if self.arbiter is None or self.chance("lose") or not agent.is_up:
            return None
        return self.arbiter.check_grant(ticket, agent.node)

    def to_holder(self, name: HolderId, decision: ToHolder) -> None:
        holder, epoch = self.holders[name], self.epoch
        if self.chance("lose"):
            return

        def deliver() -> None:
            if holder.epoch == epoch:
                holder.on_decision(decision)

        for _ in range(1 + self.chance("repeat")):
            self.at(self.now + self.delay(), deliver)

    def to_agent(self, node: NodeId, act: Callable[[Agent], None]) -> None:
        if not self.chance("lose"):
            self.at(self.now + self.delay(), lambda: act(self.agents[node]))

    def arm(self, at: Instant) -> None:
        """One timer, as in the shell: the newest SetTimer replaces the older."""
        self.armed, arbiter = at, self.arbiter

        def fire_timer() -> None:
            if self.armed == at and self.arbiter is arbiter and arbiter is not None:
                self.feed(ev.TimerFired())

        self.at(max(at, self.now), fire_timer)

    # -- faults --------------------------------------------------------------------------------

    def restart_arbiter(self) -> None:
        """It dies with its books; what it keeps on disk is the epoch, whom it knew, what it
        learned, and what people set."""
        self.epoch = Epoch(self.epoch + 1)
        policies = bundle(self.settings)
        known = frozenset(self.known)
        self.arbiter = arbiter = Arbiter(self.settings, policies, self.epoch, known, self.now)
        for restore in self.kept:
            restore(arbiter)
        self.interventions.restore_floors()
        self.interventions.tell_hours()
        self.feed(self.table())
        self.interventions.restore_registered()

    def keep(self, arbiter: Arbiter) -> None:
        """Writes to disk what the next arbiter begins with."""
        learned, accounts = arbiter.export_learned(), arbiter.export_accounts()
        usage = arbiter.export_usage()
        self.kept = (
            methodcaller("restore_learned", learned),
            methodcaller("restore_accounts", accounts),
            methodcaller("restore_usage", usage),
        )

    def kill_arbiter(self) -> None:
        self.kills["arbiter"] += 1
        if self.arbiter is not None:
            self.keep(self.arbiter)
        self.arbiter = None
        self.later(3.0, self.restart_arbiter)

    def kill_holder(self) -> None:
        living = [h for h in self.holders.values() if h.alive]
        if living:
            self.kills["holder"] += 1
            self.lose_holder(self.rng.choice(living))

    def lose_holder(self, holder: Holder) -> None:
        holder.die()
        if not isinstance(holder, LeaseHolder):
            self.later(5.0, lambda: self.new_holder(holder.agent))
        if not self.chance("unannounced"):
            self.later(2.0, lambda: self.announce(holder))

    def announce(self, holder: Holder) -> None:
        if self.arbiter is not None:
            self.known.discard(holder.holder)
            self.feed(ev.HolderLost(holder.holder))

    def kill_engine(self) -> None:
        agent = self.rng.choice(list(self.agents.values()))
        if living := [e for e in agent.engines.values() if e.alive]:
            self.kills["engine"] += 1
            agent.end(self.rng.choice(living))

    def kill_agent(self) -> None:
        self.kills["agent"] += 1
        agent = self.rng.choice(list(self.agents.values()))
        agent.down_until = Instant(self.now + int(self.rng.uniform(0.5, 12) * SECOND))
        agent.lives_count += 1
        agent.epoch = None

    def mute_holder(self) -> None:
        holder = self.rng.choice(list(self.holders.values()))
        holder.mute_until = Instant(self.now + int(self.rng.uniform(1, 15) * SECOND))

    def squeeze(self) -> None:
        """Real memory is short somewhere, as somebody says."""
        agent = self.rng.choice(list(self.agents.values()))
        where = self.rng.choice([agent.node, *(s.device for s in agent.specs)])
        level = self.rng.choice(list(types.Level))
        if self.arbiter is not None:
            self.feed(ev.PressurePushed(where, level, None, seconds(self.rng.uniform(1, 20))))

    def kill_node(self) -> None:
        agent = self.rng.choice(list(self.agents.values()))
        if agent.node in self.dead_nodes:
            return
        self.kills["node"] += 1
        self.dead_nodes.add(agent.node)
        for holder in [h for h in self.holders.values() if h.agent is agent and h.alive]:
            holder.alive = False
        agent.engines.clear()
        agent.epoch = None
        agent.lives_count += 1
        self.later(2.0, lambda: self.announce_node(agent))

    def announce_node(self, agent: Agent) -> None:
        if self.arbiter is None:  # Ray tells the next arbiter as well
            self.later(1.0, lambda: self.announce_node(agent))
            return
        self.feed(ev.NodeLost(agent.node))
        self.known -= {h.holder for h in self.holders.values() if h.agent is agent}
        self.later(5.0, lambda: self.revive_node(agent))

    def revive_node(self, agent: Agent) -> None:
        self.dead_nodes.discard(agent.node)
        for _ in range(2):
            self.new_holder(agent)

    def schedule(self, calls: int, kills: int, within_s: float) -> None:
        harms = [self.kill_holder, self.kill_engine, self.kill_arbiter, self.kill_agent,
                 self.kill_node, self.mute_holder, self.squeeze]  # fmt: skip
        weights = [self.rng.random() for _ in harms]
        for _ in range(calls):
            self.later(within_s, self.call)
        for _ in range(calls // 10):
            self.later(within_s, self.new_lease_holder)
        for harm in self.rng.choices(harms, weights, k=kills):
            self.later(within_s, harm)
        self.interventions.schedule(calls // 8, within_s)

    def call(self) -> None:
        if living := [
            h for h in self.holders.values() if h.alive and not isinstance(h, LeaseHolder)
        ]:
            priority = self.rng.choice(list(types.Priority))
            tenant = self.rng.choice(["default", *(terms.tenant for terms in TENANTS)])
            holder = self.rng.choice(living)
            model = EXTRA_MODEL if holder.capability == EXTRA else self.rng.choice(MODELS)
            holder.call(Caller(model, priority, tenant))

    def stop_faults(self) -> None:
        """Nothing breaks any more, and people free by hand what never came back."""
        self.faults = False
        for agent in self.agents.values():
            for engine in [e for e in agent.engines.values() if e.stuck]:
                agent.free(engine)
            for engine in agent.engines.values():  # the under-reporters are mended too
                engine.held = {d: b - engine.extra.get(d, 0) for d, b in engine.held.items()}
                engine.extra = {}

    # -- after the faults ----------------------------------------------------------------------

    def unfinished(self) -> list[str]:
        """Empty once everybody is answered and the books say what is true."""
        compactions = self.interventions.unfinished_compactions()
        return self.waiting() + self.differences() + self.lost_tickets() + compactions

    def waiting(self) -> list[str]:
        return [
            f"{h.holder}: {c.model}" for h in self.holders.values() if h.alive
            for c in h.callers if c.answered is None
        ]  # fmt: skip

    def differences(self) -> list[str]:
        """Where what is charged is not what is held."""
        assert self.arbiter is not None
        view = self.arbiter.snapshot(self.now)
        return [
            f"{d.device}: charged {d.charged_bytes / GIB}, held {self.physical(d.device) / GIB}"
            for d in view.devices
            if d.charged_bytes != self.physical(d.device) or d.foreign_bytes
        ]

    def lost_tickets(self) -> list[str]:
        """On the arbiter's books but known to no living holder."""
        assert self.arbiter is not None
        known = {t for h in self.holders.values() if h.alive for t in (*h.held, *h.asked)}
        return [t.ticket for t in self.arbiter.snapshot(self.now).tickets if t.ticket not in known]
