"""Processes outside Serve that lease memory: they hold it for a while, obey a notice or not, die.

Their engine is a process nobody else ends: a reap only makes the agent say when it is gone.
"""

from dataclasses import dataclass, replace
from functools import partial

from arbiter import errors
from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Grant, Revoke
from arbiter.units import GIB, Bytes, TicketId, seconds
from tests.sim.actors import BEAT_S, Held, Holder
from tests.sim.agents import Engine

LONGEST_S = 30.0
TERMS = types.LeaseConditions("t", seconds(LONGEST_S), seconds(3))


@dataclass
class LeaseHolder(Holder):
    """A holder with one lease."""

    size_bytes: int = 0
    terms: types.LeaseConditions = TERMS
    is_done: bool = False

    @property
    def ticket(self) -> TicketId:
        return TicketId(f"{self.holder}.lease")

    def serve(self) -> None:
        """It asks for itself only."""

    def beat(self) -> None:
        if not self.alive or self.is_done:
            return
        self.world.later(BEAT_S, self.beat, exactly=True)
        self.notice_deaths()
        if self.epoch is None:
            self.join()
        else:
            self.send(ev.Renewed(self.holder, self.account()))
            if not (self.held or self.is_done or self.ticket in self.asked):
                self.asked[self.ticket] = ev.Requested(
                    self.ticket, self.holder, "lease", "job", types.Need(Bytes(self.size_bytes)),
                    need_is_explicit=True, lease=self.terms,
                )  # fmt: skip
                self.ask(self.ticket)

    def join(self) -> None:
        self.epoch = None
        if self.alive and not self.is_done and self.world.now >= self.mute_until:
            event = ev.Joined(self.holder, self.agent.node, "lease", self.account())
            self.world.from_holder(self, None, event)

    def account(self) -> tuple[ev.HeldTicket, ...]:
        return tuple(replace(held, lease=self.terms) for held in super().account())

    def forget(self, ticket: Held) -> None:
        """Its process has died. Another one would lease under a name of its own."""
        super().forget(ticket)
        self.is_done = True

    def on_grant(self, grant: Grant) -> None:
        if self.asked.pop(grant.ticket, None) is None or self.held:
            return
        sizes = {d.device: int(d.size_bytes) for d in grant.devices}
        engine = Engine(grant.ticket, self.holder, sizes, host_bytes=0, is_outside=True)
        need = types.Need(Bytes(self.size_bytes))
        held = Held(grant.ticket, "job", need, types.Phase.RESIDENT, grant.devices, engine=engine)
        self.held[grant.ticket] = held
        if not self.agent.start(engine):
            return self.finish()
        self.world.later(LONGEST_S, self.finish)

    def on_revoke(self, revoke: Revoke) -> None:
        """Some obey at once, some take longer than they were given."""
        if revoke.ticket in self.held:
            self.world.later(20.0 if self.world.chance("hang") else 2.0, self.finish)

    def on_refuse(self, name: TicketId, error: errors.RequestError) -> None:
        if self.asked.pop(name, None) and isinstance(error, errors.StaleEpoch):
            self.join()
        elif not self.held:
            self.is_done = True

    def finish(self) -> None:
        held = self.held.pop(self.ticket, None)
        if held is None or not self.alive:
            return
        self.is_done = True
        if held.engine and held.engine.alive:
            self.agent.end(held.engine)
        self.send(ev.Released(self.ticket, "released"))

    def die(self) -> None:
        self.alive = False
        for engine in [e for e in self.agent.engines.values() if e.holder == self.holder]:
            self.world.later(1, partial(self.agent.end, engine))


SIZES_GIB = (5, 15, 40)


def size_of(choice: int) -> int:
    return SIZES_GIB[choice % len(SIZES_GIB)] * GIB
