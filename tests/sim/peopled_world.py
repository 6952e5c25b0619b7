"""A world with people in it: clients that leave or have a deadline, a person who loads, unloads,
raises and cancels by hand, leases of `arbiter free`, other policies and settings than the default.
A node that dies here never returns: another one, of another name, comes in its place, as in Ray.
"""

import contextlib
import itertools
import random
from dataclasses import replace
from functools import partial

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.settings import Settings
from arbiter.errors import RequestError
from arbiter.units import HolderId, NodeId, TicketId, seconds
from tests.sim.actors import Caller, Holder
from tests.sim.agents import Agent
from tests.sim.interventions import EXTRA, MOVABLE
from tests.sim.lease_holders import LeaseHolder, size_of
from tests.sim.world import MODELS, World

HARMS_COUNT = 2


class PeopledWorld(World):
    def __init__(self, seed: int) -> None:
        self.dice = random.Random(f"people {seed}")
        self.node_numbers = itertools.count(2)
        self.given_up: set[NodeId] = set()
        super().__init__(seed)

    def vary(self, settings: Settings) -> Settings:
        dice = self.dice
        return replace(
            settings,
            evict=dice.choice(["learned", "cost_aware", "priority_lru", "size_aware_lru"]),
            admit=dice.choice(["fair_share", "fifo", "warm_first"]),
            pipelines=dice.choice([(), ((EXTRA, "text"),), (("text", EXTRA),)]),
            one_resident_roles=frozenset(dice.choice([(), (), ("text", "embedding")])),
            bypass_count=dice.choice([0, 1, 8]),
            loading_most_fraction=dice.choice([0.02, 0.3]),
            compact_every_loads_count=dice.choice([0, 3]),
        )

    # -- nodes ---------------------------------------------------------------------------------

    def new_holder(self, agent: Agent) -> None:
        if agent.node not in self.dead_nodes | self.given_up:
            super().new_holder(agent)

    def revive_node(self, agent: Agent) -> None:
        node = NodeId(f"n{next(self.node_numbers)}")
        self.agents[node] = new = self._agent(node)
        self.budgets |= {s.device: int(s.total_bytes) for s in new.specs}
        self.later(1.0, new.beat)
        for _ in range(2):
            self.new_holder(new)

    def give_up_node(self) -> None:
        """Ray gives a node up whose raylet hangs; its processes live on for some seconds, in which
        its replicas rejoin, and its agent finds each new arbiter."""
        agent = self.dice.choice(list(self.agents.values()))
        if agent.node not in self.dead_nodes | self.given_up:
            self.given_up.add(agent.node)
            self.look()
            self.later(6.0, lambda: self.end_node(agent))

    def look(self) -> None:
        """The arbiter looks at Ray's nodes each second."""
        for node in self.arbiter.nodes if self.arbiter else ():
            if node in self.given_up:
                self.feed(ev.NodeLost(node))
        self.later(1.0, self.look, exactly=True)

    def end_node(self, agent: Agent) -> None:
        if agent.node in self.dead_nodes:
            return
        self.dead_nodes.add(agent.node)
        agent.engines.clear()
        for holder in [h for h in self.holders.values() if h.agent is agent and h.alive]:
            holder.alive = False
            self.later(2.0, partial(self.announce_again, holder))
        self.later(5.0, lambda: self.revive_node(agent))

    def announce_again(self, holder: Holder) -> None:
        """The next arbiter is told as well."""
        if self.arbiter is None:
            self.later(1.0, partial(self.announce_again, holder))
        else:
            self.announce(holder)

    def blind(self) -> None:
        """The driver gives no answer for a device for a while."""
        agent = self.dice.choice(list(self.agents.values()))
        device = self.dice.choice(agent.specs).device
        agent.unreadable.add(device)
        self.later(20.0, lambda: agent.unreadable.discard(device))

    def lose_gpu(self) -> None:
        agent = self.dice.choice(list(self.agents.values()))
        gpus = [s.device for s in agent.specs if s.kind is types.DeviceKind.GPU]
        if gpus and not agent.lost and agent.is_up:
            device = self.dice.choice(gpus)
            agent.lose(device)
            self.later(20.0, lambda: agent.find(device))

    # -- people --------------------------------------------------------------------------------

    def schedule(self, calls: int, kills: int, within_s: float) -> None:
        super().schedule(calls, kills, within_s)
        acts = [
            self.leave, self.leave, self.hurry, self.unload, self.load, self.load, self.raise_one,
            self.cancel, self.free,
        ]  # fmt: skip
        weights = [self.dice.random() for _ in acts]
        for act in self.dice.choices(acts, weights, k=calls):
            self.later(within_s, act)
        self.harm(within_s)

    def harm(self, within_s: float) -> None:
        """What becomes of nodes and devices, beside what every world has."""
        harms = [self.give_up_node, self.blind, self.lose_gpu]
        for harm in self.dice.choices(harms, k=HARMS_COUNT):
            self.later(self.dice.uniform(0, within_s), harm, exactly=True)

    def leave(self) -> None:
        """The clients of one replica that wait for one model go away."""
        waiting = [
            (h, c.model) for h in self.holders.values() if h.alive for c in h.callers
            if c.answered is None
        ]  # fmt: skip
        if waiting:
            holder, model = self.dice.choice(waiting)
            holder.withdraw(model)

    def hurry(self) -> None:
        """A client comes that does not wait for long."""
        living = [
            h for h in self.holders.values()
            if h.alive and h.capability == "text" and not isinstance(h, LeaseHolder)
        ]  # fmt: skip
        if living:
            deadline_s = self.dice.choice([0.5, 5.0, 12.0])
            caller = Caller(self.dice.choice(MODELS), deadline_s=deadline_s)
            self.dice.choice(living).call(caller)

    def by_hand(self, event: ev.Event) -> None:
        if self.arbiter is not None:
            with contextlib.suppress(RequestError):
                self.feed(event)

    def ticket(self) -> TicketId:
        tickets = self.arbiter.snapshot(self.now).tickets if self.arbiter else ()
        return self.dice.choice([t.ticket for t in tickets] or [TicketId("none")])

    def unload(self) -> None:
        self.by_hand(ev.UnloadAsked(self.ticket()))

    def load(self) -> None:
        self.by_hand(ev.LoadAsked("text", self.dice.choice(MOVABLE)))

    def raise_one(self) -> None:
        self.by_hand(ev.PriorityRaised(self.ticket(), types.Priority.URGENT))

    def cancel(self) -> None:
        self.by_hand(ev.CancelAsked(self.ticket()))

    def free(self) -> None:
        """A person takes what is idle for a while; what left for it returns."""
        agents = [a for a in self.agents.values() if a.node not in self.dead_nodes]
        if not agents:
            return
        terms = types.LeaseConditions(
            "t", seconds(self.dice.uniform(5, 40)), seconds(3), frees=True
        )
        job = LeaseHolder(
            self, HolderId(f"f{next(self.names)}"), self.dice.choice(agents),
            size_bytes=size_of(self.dice.randrange(3)), terms=terms,
        )  # fmt: skip
        self.holders[job.holder] = job
        self.later(1.0, job.beat)
