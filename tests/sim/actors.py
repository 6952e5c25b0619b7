"""The holders of the simulated world, and those who call them. As agents.py has it, each can fail,
and shares nothing with the arbiter but messages.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from arbiter import errors
from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Grant, LoadModel, Refuse, Revoke, Tier, WithdrawLoad
from arbiter.units import (
    GIB,
    Bytes,
    Epoch,
    HolderId,
    Instant,
    Span,
    TicketId,
    host_device,
    seconds,
)
from tests.sim.agents import Agent, Engine, Spawn

if TYPE_CHECKING:
    from tests.sim.world import World

ToHolder = Grant | Refuse | Revoke | LoadModel | WithdrawLoad
BEAT_S = 1.0
ASK_AGAIN_S = 3.0
GROWS_S, STAYS_GROWN_S = 10.0, 15.0
RESIDUE_SHARE = 0.05  # of the device bytes, left while asleep


@dataclass
class Held:
    """A ticket as its holder knows it."""

    ticket: TicketId
    model: str
    need: types.Need
    phase: types.Phase
    devices: tuple[types.DeviceBytes, ...] = ()
    inflight: int = 0
    idle_since: Instant = Instant(0)
    engine: Engine | None = None
    is_barred: bool = False
    priority: types.Priority = types.Priority.NORMAL
    tenant: str = "default"  # of its last request
    uses_count: int = 0
    wants_bytes: int = 0  # more, and nobody has answered yet
    before: tuple[types.DeviceBytes, ...] = ()  # it grew


def total(devices: tuple[types.DeviceBytes, ...]) -> int:
    return sum(d.size_bytes for d in devices)


@dataclass
class Caller:
    """Wants one answer. `answered` says how it ended."""

    model: str
    priority: types.Priority = types.Priority.NORMAL
    tenant: str = "default"
    deadline_s: float | None = None
    answered: str | None = None


@dataclass
class Holder:
    """A replica: loads, serves, drains, sleeps, dies."""

    world: "World"
    holder: HolderId
    agent: Agent
    epoch: Epoch | None = None
    alive: bool = True
    capability: str = "text"
    is_driver: bool = False
    mute_until: Instant = Instant(0)
    held: dict[TicketId, Held] = field(default_factory=dict)
    asked: dict[TicketId, ev.Requested] = field(default_factory=dict)
    callers: list[Caller] = field(default_factory=list)
    number: int = 0
    deadlines: dict[TicketId, Instant] = field(default_factory=dict)  # of what it asked for

    # -- callers -------------------------------------------------------------------------------

    def call(self, caller: Caller) -> None:
        self.callers.append(caller)
        self.serve()

    def serve(self) -> None:
        """Start what can be served; ask for what is missing."""
        for caller in [c for c in self.callers if c.answered is None]:
            ticket = self.current(caller.model)
            if ticket and ticket.phase is types.Phase.RESIDENT and not ticket.is_barred:
                caller.answered = "served"
                ticket.inflight += 1
                ticket.priority, ticket.tenant = caller.priority, caller.tenant
                ticket.uses_count += 1
                takes_s = 15.0 if self.world.chance("long") else 2.0
                self.world.later(takes_s, partial(self.done, ticket))
            elif not any(self.raise_priority(r, caller) for r in self.asked.values()):
                self.want(
                    caller.model, ticket, priority=caller.priority, tenant=caller.tenant,
                    deadline_s=caller.deadline_s,
                )  # fmt: skip
        self.callers = [c for c in self.callers if c.answered is None]

    def current(self, model: str) -> Held | None:
        return next((h for h in self.held.values() if h.model == model), None)

    def raise_priority(self, request: ev.Requested, caller: Caller) -> bool:
        """It waits for the same model: then for the more urgent of the two."""
        if request.model == caller.model and caller.priority < request.priority:
            self.asked[request.ticket] = replace(request, priority=caller.priority)
            self.send(self.asked[request.ticket])
        return request.model == caller.model

    def want(
        self, model: str, ticket: Held | None, attempt: int = 1,
        priority: types.Priority = types.Priority.NORMAL, tenant: str = "default",
        deadline_s: float | None = None,
    ) -> None:  # fmt: skip
        if ticket and ticket.phase is not types.Phase.ASLEEP:
            return  # loading, or leaving: asked again when that is over
        if ticket is None:
            self.number += 1
        name = ticket.ticket if ticket else TicketId(f"{self.holder}.{model}.{self.number}")
        need = self.world.needs[model]
        request = ev.Requested(
            name, self.holder, self.capability, model, need, need_is_explicit=True,
            attempt=attempt, priority=priority, client=types.Client(tenant),
        )  # fmt: skip
        self.deadlines.pop(name, None)
        if deadline_s is not None:
            self.deadlines[name] = Instant(self.world.now + seconds(deadline_s))
        self.asked[name] = request
        self.ask(name)

    def want_together(self, models: tuple[str, ...]) -> None:
        """A gang; nothing when one of them is here or asked for already."""
        asked = {request.model for request in self.asked.values()}
        if any(model in asked or self.current(model) for model in models):
            return
        names = tuple(TicketId(f"{self.holder}.{m}.{self.number + 1}") for m in models)
        self.number += 1
        for name, model in zip(names, models, strict=True):
            self.asked[name] = ev.Requested(
                name, self.holder, self.capability, model, self.world.needs[model],
                need_is_explicit=True, gang=names,
            )  # fmt: skip
            self.ask(name)

    def ask(self, name: TicketId) -> None:
        if self.alive and (request := self.asked.get(name)):
            until = self.deadlines.get(name)
            left = None if until is None else Span(max(0, until - self.world.now))
            self.send(replace(request, deadline=left))
            self.world.later(ASK_AGAIN_S, lambda: self.ask(name), exactly=True)

    def withdraw(self, model: str) -> None:
        """The last caller has gone, or a person takes back a load."""
        self.answer_all(model, "left")
        requests = [request for request in self.asked.values() if request.model == model]
        asked = {name for request in requests for name in (request.ticket, *request.gang)}
        loading = {
            held.ticket
            for held in self.held.values()
            if held.model == model and held.phase is types.Phase.LOADING
        }
        for name in sorted(asked | loading):
            self.asked.pop(name, None)
            self.send(ev.Withdrawn(name, self.holder))

    def done(self, ticket: Held) -> None:
        if ticket.inflight:
            ticket.inflight -= 1
            ticket.idle_since = self.world.now

    # -- growing -------------------------------------------------------------------------------

    def want_more(self, ticket: Held) -> None:
        """For a while; then it goes on as it is."""
        ticket.wants_bytes = self.world.rng.randint(1, 25) * GIB
        more = Bytes(ticket.wants_bytes)
        self.send(ev.GrowthAsked(ticket.ticket, more, seconds(GROWS_S), self.holder))
        self.world.later(GROWS_S + 2, lambda: self.want_no_more(ticket), exactly=True)

    def want_no_more(self, ticket: Held) -> None:
        if ticket.wants_bytes:
            ticket.wants_bytes = 0
            self.send(ev.GrowthAsked(ticket.ticket, Bytes(0), seconds(0), self.holder))

    def growing(self, grant: Grant) -> Held | None:
        """Whose grant of more it is; a repeated one of its load says nothing new."""
        ticket = self.held.get(grant.ticket)
        is_more = ticket is not None and total(grant.devices) > total(ticket.devices)
        return ticket if ticket and ticket.wants_bytes and is_more else None

    def on_growth(self, ticket: Held, grant: Grant) -> None:
        """What is in flight does not always end in time for it."""
        ticket.wants_bytes = 0
        if ticket.phase is not types.Phase.RESIDENT or ticket.is_barred or ticket.engine is None:
            return
        before, ticket.devices = ticket.devices, grant.devices
        if self.world.chance("long"):
            self.shrink(ticket, before)
            return
        ticket.before = ticket.before or before
        ticket.engine.resize(grant.devices)
        self.world.later(STAYS_GROWN_S, lambda: self.give_back(ticket))

    def give_back(self, ticket: Held) -> None:
        is_here = self.alive and self.held.get(ticket.ticket) is ticket
        if is_here and ticket.phase is types.Phase.RESIDENT and ticket.engine and ticket.before:
            ticket.engine.resize(ticket.before)
            self.shrink(ticket, ticket.before)
            ticket.before = ()

    def shrink(self, ticket: Held, to: tuple[types.DeviceBytes, ...]) -> None:
        ticket.devices = to
        self.send(ev.GaveBack(ticket.ticket, to))

    # -- the wire ------------------------------------------------------------------------------

    def send(self, event: ev.Event) -> None:
        if self.alive and self.world.now >= self.mute_until:
            self.world.from_holder(self, self.epoch, event)

    def beat(self) -> None:
        if self.alive:
            self.world.later(BEAT_S, self.beat, exactly=True)
            self.notice_deaths()
            self.serve()
            if self.epoch is not None:
                self.send(ev.Renewed(self.holder, self.account()))
            else:
                self.join()

    def join(self) -> None:
        """Also its answer to being told that its epoch is over."""
        self.epoch = None
        if self.alive and self.world.now >= self.mute_until:
            event = ev.Joined(
                self.holder, self.agent.node, self.capability, self.account(),
                is_driver=self.is_driver,
            )  # fmt: skip
            self.world.from_holder(self, None, event)

    def account(self) -> tuple[ev.HeldTicket, ...]:
        def idle(h: Held) -> Span:
            return Span(0 if h.inflight else self.world.now - h.idle_since)

        return tuple(
            ev.HeldTicket(
                h.ticket, h.model, h.phase, h.inflight, idle(h), h.devices, h.need,
                priority=h.priority, uses_count=h.uses_count, client=types.Client(h.tenant),
            )
            for h in self.held.values()
        )  # fmt: skip

    def notice_deaths(self) -> None:
        """The pipe to a child closes when it dies."""
        for ticket in list(self.held.values()):
            if ticket.engine is None or not ticket.engine.alive:
                self.forget(ticket)

    def forget(self, ticket: Held) -> None:
        self.held.pop(ticket.ticket, None)
        self.asked.pop(ticket.ticket, None)

    def on_decision(self, decision: ToHolder) -> None:
        if not self.alive:
            return
        match decision:
            case Grant():
                if ticket := self.growing(decision):
                    self.on_growth(ticket, decision)
                else:
                    self.on_grant(decision)
            case Refuse(ticket, error):
                self.on_refuse(ticket, error)
            case Revoke():
                self.on_revoke(decision)
            case LoadModel() | WithdrawLoad():
                self.on_unasked_load(decision)

    def on_unasked_load(self, decision: LoadModel | WithdrawLoad) -> None:
        model = decision.model
        if isinstance(decision, LoadModel):
            if self.current(model) is None:
                self.want(model, None)
        elif not any(c.model == model and c.answered is None for c in self.callers):
            self.withdraw(model)

    # -- loading -------------------------------------------------------------------------------

    def on_grant(self, grant: Grant) -> None:
        request = self.asked.pop(grant.ticket, None)
        if request is None:
            return  # answered already, or nobody waits: the heartbeat says so
        ticket = self.held.get(grant.ticket)
        if ticket is not None:
            if ticket.phase is types.Phase.ASLEEP:
                self.wake(ticket)
            return
        ticket = Held(grant.ticket, request.model, request.need, types.Phase.LOADING, grant.devices)
        ticket.priority, ticket.tenant = request.priority, request.client.tenant
        sizes = {d.device: int(d.size_bytes) for d in grant.devices}
        ticket.engine = Engine(grant.ticket, self.holder, sizes, request.need.host_bytes)
        self.held[grant.ticket] = ticket
        self.agent.spawn(ticket.engine, lambda how: self.spawned(ticket, request, how))

    def spawned(self, ticket: Held, request: ev.Requested, how: Spawn) -> None:
        assert ticket.engine is not None
        self.world.told[f"spawn_{how.name.lower()}"] += 1
        if how is Spawn.STARTED and not self.alive:  # it sees the pipe closed, and exits
            self.world.later(1, partial(self.agent.end, ticket.engine))
        elif how is not Spawn.STARTED:
            self.forget(ticket)
            if how is Spawn.FAILED:
                self.send(ev.LoadBroke(ticket.ticket, "no engine process", False))
        elif self.world.chance("oom"):
            self.world.later(2, lambda: self.broke(ticket, request, True))
        elif self.world.chance("broken"):
            self.world.later(2, lambda: self.broke(ticket, request, False))
        elif not self.world.chance("hang"):
            self.world.later(4, lambda: self.loaded(ticket))

    def wake(self, ticket: Held) -> None:
        assert ticket.engine is not None
        ticket.phase, ticket.is_barred = types.Phase.LOADING, False
        ticket.engine.fill()
        self.world.later(1, lambda: self.loaded(ticket))

    def loaded(self, ticket: Held) -> None:
        engine = ticket.engine
        if not self.alive or engine is None or not engine.alive:
            return
        ticket.phase, ticket.idle_since = types.Phase.RESIDENT, self.world.now
        is_used = any(c.answered is None and c.model == ticket.model for c in self.callers)
        self.send(ev.Loaded(ticket.ticket, seconds(1), is_used=is_used))
        self.world.later(1, lambda: self.drop_host_copy(ticket))
        if self.world.chance("rogue"):
            engine.take_more(0.2)
        self.serve()

    def drop_host_copy(self, ticket: Held) -> None:
        if ticket.engine and ticket.engine.alive and ticket.phase is not types.Phase.ASLEEP:
            ticket.engine.held.pop(host_device(self.agent.node), None)

    def broke(self, ticket: Held, request: ev.Requested, out_of_memory: bool) -> None:
        if not self.alive or ticket.engine is None or ticket.ticket not in self.held:
            return
        self.agent.end(ticket.engine)
        self.forget(ticket)
        self.send(ev.LoadBroke(ticket.ticket, "injected", out_of_memory))
        if out_of_memory and request.attempt == 1:
            self.want(ticket.model, None, attempt=2, tenant=ticket.tenant)
        else:
            self.answer_all(ticket.model, "load failed")

    def on_refuse(self, name: TicketId, error: errors.RequestError) -> None:
        request = self.asked.pop(name, None)
        if request is None:
            if held := self.held.get(name):
                held.wants_bytes = 0
            return
        for other in request.gang:  # it makes no sense alone
            if self.asked.pop(other, None):
                self.send(ev.Withdrawn(other, self.holder))
        if isinstance(error, errors.StaleEpoch):
            self.join()
        elif not isinstance(error, errors.TicketClosed):
            self.answer_all(request.model, type(error).__name__)
        # Otherwise whoever still waits asks under a new ticket with the next beat.

    def answer_all(self, model: str, how: str) -> None:
        for caller in self.callers:
            if caller.model == model and caller.answered is None:
                caller.answered = how

    # -- leaving -------------------------------------------------------------------------------

    def on_revoke(self, revoke: Revoke) -> None:
        ticket = self.held.get(revoke.ticket)
        if ticket is None or ticket.is_barred or self.world.now < self.mute_until:
            return
        if ticket.phase is types.Phase.ASLEEP:
            self.forget(ticket)
            return
        if ticket.phase is not types.Phase.RESIDENT:
            return
        if ticket.inflight and revoke.reason.only_if_idle:
            self.send(ev.Busy(ticket.ticket, ticket.inflight))
            return
        ticket.is_barred, ticket.phase = True, types.Phase.DRAINING
        self.drain(ticket, revoke, self.world.now + self.world.settings.timeouts.barrier)

    def drain(self, ticket: Held, revoke: Revoke, until: int) -> None:
        if not self.alive or self.held.get(ticket.ticket) is not ticket:
            return
        if ticket.inflight == 0:
            ticket.phase = types.Phase.UNLOADING
            if not self.world.chance("wedged"):  # else it says unloading for ever
                self.world.later(1, lambda: self.unload(ticket, revoke.to))
        elif self.world.now >= until:
            ticket.is_barred, ticket.phase = False, types.Phase.RESIDENT
            self.send(ev.BarrierDropped(ticket.ticket, ticket.inflight))
            self.serve()
        else:
            self.world.later(0.3, lambda: self.drain(ticket, revoke, until))

    def unload(self, ticket: Held, to: Tier) -> None:
        engine = ticket.engine
        if not self.alive or engine is None or not engine.alive:
            return
        if to is Tier.ASLEEP:
            if not self.world.chance("liar"):
                host = host_device(self.agent.node)
                residue = {d: int(b * RESIDUE_SHARE) for d, b in engine.granted.items()}
                engine.held, engine.extra = {**residue, host: engine.host_bytes}, {}
            ticket.phase = types.Phase.ASLEEP
            self.send(ev.Slept(ticket.ticket))
        else:
            self.forget(ticket)
            self.world.later(0.5, lambda: self.agent.end(engine))
            self.send(ev.Released(ticket.ticket, "swap"))
        self.serve()

    # -- dying ---------------------------------------------------------------------------------

    def die(self) -> None:
        """Its children see the pipe close and exit, unless they hang."""
        self.alive = False
        for engine in [e for e in self.agent.engines.values() if e.holder == self.holder]:
            if not self.world.chance("hang"):
                self.world.later(1, partial(self.agent.end, engine))
