"""A dry run changes nothing, and what it says is what then happens when nothing else does (K3)."""

import hashlib
import pickle

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.arbiter import Arbiter
from arbiter.core.decisions import (
    Decision,
    EventKind,
    Grant,
    KillEngine,
    LoadModel,
    LogEvent,
    Refuse,
    Revoke,
)
from arbiter.core.records.ticket import State
from arbiter.core.reports.plan import Answer, Plan, PlanQuestion
from arbiter.units import Bytes, HolderId, NodeId, TicketId, seconds
from tests.model.ledger_machine import HOLDER_OF, SIZES, TICKETS, LedgerMachine
from tests.support.core_driver import PLAIN, gib
from tests.support.examples import examples
from tests.support.gpu_core_driver import GPU, OTHER, GpuCoreDriver


def digest(arbiter: Arbiter) -> str:
    return hashlib.sha256(pickle.dumps(arbiter)).hexdigest()


def victims_told(decisions: list[Decision], asker: str) -> set[str]:
    """The tickets that were asked to leave for an asker."""
    told = [d for d in decisions if isinstance(d, LogEvent) and d.kind is EventKind.EVICTION]
    return {str(d.ticket) for d in told if d.data["waiting"] == asker}


def check_against(plan: Plan, decisions: list[Decision], ticket: str) -> None:
    """The plan's answer is what the same request got."""
    grants = [d for d in decisions if isinstance(d, Grant) and d.ticket == ticket]
    refusals = [d for d in decisions if isinstance(d, Refuse) and d.ticket == ticket]
    went = victims_told(decisions, ticket)
    match plan.answer:
        case Answer.NOW:
            assert [g.devices for g in grants] == [plan.goes_to]
        case Answer.AFTER_EVICTING:
            assert not grants and not refusals
            assert {str(v.ticket) for v in plan.victims} == went
        case Answer.NOT_BEFORE if plan.code is None:
            assert not grants and not refusals and not went
        case _:
            assert [r.error.code for r in refusals] == [plan.code]


class DryRunMachine(LedgerMachine):
    """Before each request a dry run of it, in whatever state the events have led to."""

    @rule(
        ticket=TICKETS, size=SIZES, sleeps=st.booleans(), attempt=st.just(1),
        priority=st.sampled_from(types.Priority),
    )  # fmt: skip
    def request(
        self, ticket: TicketId, size: int, sleeps: bool, attempt: int, priority: types.Priority
    ) -> None:
        holder = HOLDER_OF[ticket]
        need = types.Need(Bytes(size), host_bytes=Bytes(size if sleeps else 0))
        question = PlanQuestion(
            "text", ticket, need, True, priority=priority, node=NodeId("n"), holder=holder
        )
        before = digest(self.arbiter)
        plan = self.arbiter.plan(question, self.now)
        assert digest(self.arbiter) == before
        is_new = self.core.find(ticket) is None and not self.core.has_answer(ticket)
        has_joined = self.arbiter.has_joined(holder)
        super().request(ticket, size, sleeps, attempt, priority)
        if is_new and has_joined and size % 2 == 0:  # the others have a deadline
            check_against(plan, pickle.loads(self.log[-1][2]), ticket)


TestDryRun = pytest.mark.spec("K3")(DryRunMachine.TestCase)
TestDryRun.settings = settings(
    max_examples=examples(60),
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


class GpuWorld(GpuCoreDriver):
    """Two GPUs with residents; victims leave as they are asked, and nothing else happens."""

    def settle(self, t: float, decisions: list[Decision], asker: str) -> list[Grant]:
        grants: list[Grant] = []
        queue = list(decisions)
        while queue:
            match queue.pop(0):
                case Revoke(ticket):
                    queue += self.at(t, ev.Released(ticket, "swap"))
                case KillEngine(_, ticket):
                    queue += self.gone(t, ticket)
                case Grant(ticket) as grant if ticket == asker:
                    grants.append(grant)
        return grants


TERMS = types.LeaseConditions("ops", seconds(60), seconds(0), frees=True)
RESIDENTS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=8)


def filled(residents: list[tuple[int, int]]) -> GpuWorld:
    """Each of a size and with so many requests in flight, as far as there is room."""
    world = GpuWorld(device=80, host=0, settings=PLAIN)
    for n, (size, inflight) in enumerate(residents):
        name = f"{'abcde'[n % 5]}{n}"
        if not world.settle(n, world.ask(n, name, size), name):
            world.at(n, ev.Withdrawn(TicketId(name)))
            continue
        world.at(n, ev.Loaded(TicketId(name), seconds(0)))
        world.beat(n, name, inflight=inflight)
    return world


@pytest.mark.spec("K3")
@given(residents=RESIDENTS, wanted=st.integers(1, 90), priority=st.sampled_from(types.Priority))
@settings(max_examples=examples(150), deadline=None, derandomize=True)
def test_the_victims_and_the_device_of_a_dry_run_are_those_of_the_request(
    residents: list[tuple[int, int]], wanted: int, priority: types.Priority
) -> None:
    world = filled(residents)
    question = PlanQuestion(
        "text", "large", types.Need(gib(wanted)), True, priority=priority, holder=HolderId("h")
    )
    before = digest(world.arbiter)
    plan = world.arbiter.plan(question, world.state.now)
    assert digest(world.arbiter) == before
    told = len(world.logged)
    t = len(residents) - 1
    decisions = world.ask(t, "large", wanted, priority=priority)
    check_against(plan, [*decisions, *world.logged[told:]], "large")
    if plan.answer is Answer.AFTER_EVICTING:
        [grant] = world.settle(t, decisions, "large")
        assert grant.devices == plan.goes_to


@pytest.mark.spec("A15", "K3")
@given(residents=RESIDENTS, wanted=st.integers(1, 90))
@settings(max_examples=examples(150), deadline=None, derandomize=True)
def test_freeing_takes_idle_models_alone_and_all_of_them_return(
    residents: list[tuple[int, int]], wanted: int
) -> None:
    world = filled(residents)
    idle, in_use = set(), set()
    for ticket in world.tickets(State.RESIDENT):
        (in_use if ticket.inflight else idle).add(str(ticket.id))
    t, need, asker = len(residents) - 1, types.Need(gib(wanted)), HolderId("free")
    question = PlanQuestion("lease", "gpu", need, True, lease=TERMS)
    plan = world.arbiter.plan(question, world.state.now)
    world.at(t, ev.Joined(asker, NodeId("n"), "lease", ()))
    told = len(world.logged)
    request = ev.Requested(TicketId("free"), asker, "lease", "gpu", need, lease=TERMS)
    decisions = world.at(t, request)
    check_against(plan, [*decisions, *world.logged[told:]], "free")
    if plan.answer is Answer.NEVER:
        assert not idle and world.free(GPU) == world.free(OTHER) == 0
        return
    grants = world.settle(t, decisions, "free")
    assert [grant.devices for grant in grants] == [plan.goes_to]
    there = {str(ticket.id) for ticket in world.tickets(State.RESIDENT)} - {"free"}
    assert in_use <= there
    went = idle - there
    assert went == {str(victim.ticket) for victim in plan.victims}
    after = world.at(t + 1, ev.Released(TicketId("free"), "released"))
    assert {d.model for d in after if isinstance(d, LoadModel)} == {w[0] for w in went} - {
        name[0] for name in there
    }
