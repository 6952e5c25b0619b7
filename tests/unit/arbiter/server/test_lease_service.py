"""The lease service: calls of outside processes that repeat everything, and their effects."""

import asyncio
import time
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.arbiter import Arbiter
from arbiter.errors import (
    AgentAway,
    ArbiterError,
    ArbiterUnavailable,
    LeaseRefused,
    QuotaExceeded,
    TicketClosed,
    UnknownLease,
)
from arbiter.protocol import messages
from arbiter.server.event_log import EventLog
from arbiter.server.lease_service import LeaseService
from arbiter.server.shell import Shell
from arbiter.server.store import ExpectedHolder, GrantedLease
from arbiter.units import DeviceId, Epoch, HolderId, Instant, NodeId, TicketId, in_seconds, seconds
from policies import bundle
from tests.support.core_driver import CPU, HOST, NODE, PLAIN, gib

JOB = TicketId("lease:t:job")
TERMS = types.LeaseConditions("t", seconds(3600), seconds(5), preemptible=True)


def reraise(error: BaseException) -> NoReturn:
    raise error


class LeaseServiceHarness:
    """A service on a real shell and core, with a clock that stands still unless moved."""

    def __init__(
        self,
        known: frozenset[HolderId] = frozenset(),
        granted: tuple[GrantedLease, ...] = (),
    ) -> None:
        self.granted = granted
        self.now, self.adopted, self.known = 0.0, [], set(known)  # type: ignore[var-annotated]
        self.refuse: ArbiterError | None = None
        settings = replace(PLAIN, lease_tenant_fraction=1.0)
        core = Arbiter(settings, bundle(settings), Epoch(1), known, Instant(0))
        self.shell = Shell(
            core, Epoch(1), self, EventLog(Epoch(1)), crash=reraise,
            clock=lambda: Instant(int(self.now * 1e9)),
        )  # fmt: skip
        specs = (
            types.DeviceSpec(CPU, types.DeviceKind.CPU, gib(80)),
            types.DeviceSpec(HOST, types.DeviceKind.HOST, gib(0)),
        )
        self.shell.feed(ev.NodeSeen(NODE, specs))
        self.read()
        self.service = LeaseService(self.shell, self, self)  # type: ignore[arg-type]

    def read(self) -> None:
        readings = tuple(ev.DeviceReading(d, gib(80), gib(0)) for d in (CPU, HOST))
        self.shell.feed(ev.Measured(NODE, readings, ()))

    def kill(self, node: NodeId, ticket: TicketId) -> None: ...
    def probe(self, node: NodeId) -> None: ...

    async def adopt(self, node: NodeId, ticket: TicketId, pid: int, granted: Any) -> None:
        if self.refuse:
            raise self.refuse
        self.adopted.append((ticket, pid))

    def add_member(self, member: ExpectedHolder) -> None:
        self.known.add(member.holder)

    def drop_holder(self, holder: HolderId) -> None:
        self.known.discard(holder)

    def leases(self) -> tuple[GrantedLease, ...]:
        return self.granted

    def save_leases(self, leases: tuple[GrantedLease, ...]) -> None:
        self.granted = leases

    @property
    def ends(self) -> dict[str, float]:
        return {granted.call.ticket: granted.ends_unix_s for granted in self.granted}

    async def call(self, size: float = 30, **more: Any) -> messages.LeaseState:
        asked = messages.LeaseCall("job", gib(size), TERMS, "job", **more)
        async with asyncio.timeout(60):
            return await self.service.update(asked)


def granted_before(
    lease: str = "job",
    *,
    left_s: float,
    terms: types.LeaseConditions = TERMS,
    is_kept: bool = False,
    returning: tuple[types.ModelName, ...] = (),
) -> GrantedLease:
    """As an earlier epoch has saved it."""
    call = messages.LeaseCall(lease, gib(30), terms, lease)
    history = types.LeaseHistory((), returning)
    held = (types.DeviceBytes(CPU, gib(30)),)
    return GrantedLease(call, NODE, held, time.time() + left_s, is_kept, history)


@pytest.fixture
async def harness() -> LeaseServiceHarness:
    return LeaseServiceHarness()


pytestmark = pytest.mark.spec("A15")


async def test_a_lease_is_asked_for_held_and_given_back(harness: LeaseServiceHarness) -> None:
    said = await harness.call(wait=seconds(3), seen="queued")
    assert (said.state, said.devices) == ("held", (types.DeviceBytes(CPU, gib(30)),))
    assert said.lapse == PLAIN.timeouts.lease_lapse
    assert (await harness.call(pid=77)).state == "held" and harness.adopted == [(JOB, 77)]
    harness.service.give_back("job", "t")
    assert harness.shell.core.state_of(JOB) == "reclaiming" and not harness.known
    assert (await harness.call()).state == "ended"


async def test_a_lease_named_like_an_engines_ticket_touches_no_engine(
    harness: LeaseServiceHarness,
) -> None:
    engine = TicketId("job")
    harness.shell.feed(ev.Joined(HolderId("r"), NODE, "lease", ()))
    asked = ev.Requested(engine, HolderId("r"), "lease", "m", types.Need(gib(5)), lease=TERMS)
    await harness.shell.acquire(asked)
    said = await harness.call(wait=seconds(3), seen="queued", pid=77)
    assert said.ticket == JOB and harness.adopted == [(JOB, 77)]
    harness.service.give_back("job", "t")
    harness.service.give_back("job", "t")
    assert harness.shell.core.state_of(JOB) == "reclaiming"
    assert harness.shell.core.state_of(engine) == "resident"
    bad = messages.LeaseCall("t:job", gib(1), TERMS, "job")
    with pytest.raises(LeaseRefused, match="`id`"):
        await harness.service.update(bad)


async def test_another_tenants_lease_is_not_found_and_goes_on(harness: LeaseServiceHarness) -> None:
    await harness.call(wait=seconds(3), seen="queued")
    for lease, tenant in (("job", "u"), (JOB, "t"), ("t:job", "u")):
        with pytest.raises(UnknownLease):
            harness.service.give_back(lease, tenant)
    assert harness.shell.core.state_of(JOB) == "resident"


async def test_withdrawal_by_another_holder_does_not_end_a_wait(
    harness: LeaseServiceHarness,
) -> None:
    await harness.call(size=60, wait=seconds(3), seen="queued")
    waits = asyncio.ensure_future(harness.shell.acquire(_asks_for("late", 30)))
    await asyncio.sleep(0)
    harness.shell.withdraw(ev.Withdrawn(TicketId("late"), HolderId("other")))
    for _ in range(3):  # as many turns as its answer would take
        await asyncio.sleep(0)
    assert not waits.done()
    assert harness.shell.core.state_of(TicketId("late")) == "queued"
    harness.shell.withdraw(ev.Withdrawn(TicketId("late"), HolderId(JOB)))
    with pytest.raises(TicketClosed):
        await waits


def _asks_for(ticket: str, size: float) -> ev.Requested:
    asked = TicketId(ticket), HolderId(JOB), "lease", "m", types.Need(gib(size))
    return ev.Requested(*asked, lease=types.LeaseConditions("u", seconds(9), seconds(1)))


async def test_notice_comes_with_the_time_that_is_left_and_then_the_end(
    harness: LeaseServiceHarness,
) -> None:
    await harness.call(wait=seconds(3), seen="queued")
    waiting = asyncio.ensure_future(harness.call(seen="held", wait=seconds(3)))
    await asyncio.sleep(0)
    harness.now = 2
    harness.shell.feed(ev.UnloadAsked(JOB))
    said = await waiting
    assert (said.state, said.reason) == ("leaving", "manual")
    assert said.left is not None and seconds(4) < said.left <= seconds(5)
    waiting = asyncio.ensure_future(harness.call(seen="leaving", wait=seconds(3)))
    await asyncio.sleep(0)
    harness.now = 10
    harness.shell.feed(ev.TimerFired())
    assert (await waiting).state == "ended"


async def test_refused_lease_raises_its_error_and_leaves_no_session(
    harness: LeaseServiceHarness,
) -> None:
    with pytest.raises(QuotaExceeded):
        await harness.call(size=100, wait=seconds(3), seen="queued")
    assert not harness.known and harness.shell.core.state_of(JOB) == "closed"


async def test_a_process_that_is_not_there_ends_the_lease(harness: LeaseServiceHarness) -> None:
    harness.refuse = LeaseRefused("pid", "77 is no process")
    with pytest.raises(LeaseRefused):
        await harness.call(wait=seconds(3), seen="queued", pid=77)
    assert harness.shell.core.state_of(JOB) == "reclaiming"


async def test_agent_restart_ends_no_lease_and_its_process_is_adopted_again(
    harness: LeaseServiceHarness,
) -> None:
    harness.refuse = AgentAway("n has no agent")
    assert (await harness.call(wait=seconds(3), seen="queued", pid=77)).state == "held"
    harness.refuse = None
    assert (await harness.call(pid=77)).state == "held" and harness.adopted == [(JOB, 77)]


async def test_refused_lease_whose_client_left_is_swept_and_keeps_its_reason(
    harness: LeaseServiceHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await harness.call(size=100)).state == "queued"
    for _ in range(3):  # until its task has heard the refusal
        await asyncio.sleep(0)
    monkeypatch.setattr("arbiter.server.lease_service.LATE_S", -1.0)
    harness.service.sweep()
    assert not harness.known and not harness.shell.holders
    said = await harness.call()
    assert said.state == "ended" and said.reason and "it may have" in said.reason


@pytest.mark.parametrize(
    "claim",
    [
        (types.DeviceBytes(CPU, gib(79)),),
        (types.DeviceBytes(CPU, gib(500)),),
        (types.DeviceBytes(DeviceId("m/gpu:0"), gib(30)),),  # of another node
        (),
    ],
)
async def test_claim_to_hold_bytes_is_believed_only_of_leases_known_before_the_restart(
    claim: tuple[types.DeviceBytes, ...],
) -> None:
    """And of these what was granted, whatever they claim."""
    granted = (types.DeviceBytes(CPU, gib(30)),)
    stranger = LeaseServiceHarness()
    said = await stranger.call(devices=claim, wait=seconds(3), seen="queued")
    assert said.devices == granted
    queued = LeaseServiceHarness(frozenset({HolderId(JOB)}))  # when the arbiter ended
    said = await queued.call(devices=claim)
    assert (said.state, said.devices) == ("queued", ())
    known = LeaseServiceHarness(frozenset({HolderId(JOB)}), (granted_before(left_s=60),))
    said = await known.call(devices=claim, node=NodeId("m"))
    assert (said.state, said.devices, said.node) == ("held", granted, NODE)
    [device] = [d for d in known.shell.core.snapshot(Instant(0)).devices if d.device == CPU]
    assert device.free_bytes == gib(50)


async def test_a_term_goes_on_over_a_restart_whatever_its_holder_says_is_left() -> None:
    before = LeaseServiceHarness()
    said = await before.call(wait=seconds(3), seen="queued")
    assert 0 < before.ends[JOB] - time.time() <= 3600
    after = LeaseServiceHarness(frozenset({HolderId(JOB)}), (granted_before(left_s=60),))
    assert (await after.call(devices=said.devices)).state == "held"
    [ticket] = after.shell.core.snapshot(Instant(0)).tickets
    assert ticket.left is not None and seconds(1) < ticket.left <= seconds(60)
    after.service.give_back("job", "t")
    assert after.ends == {}


async def test_term_of_a_lease_that_never_rejoins_is_forgotten_when_it_ends() -> None:
    other = TicketId("lease:t:other")
    saved = granted_before(left_s=-1), granted_before("other", left_s=60)
    after = LeaseServiceHarness(frozenset({HolderId(JOB)}), saved)
    after.service.sweep()
    assert after.ends.keys() == {JOB, other}  # it may be on its way
    after.now = in_seconds(PLAIN.timeouts.lost)
    after.read()
    after.service.sweep()
    assert after.ends.keys() == {other}
    late = await after.call(
        devices=(types.DeviceBytes(CPU, gib(79)),), wait=seconds(3), seen="queued"
    )
    assert late.devices == (
        types.DeviceBytes(CPU, gib(30)),
    )  # what it says it holds is not believed


async def test_leases_with_missed_heartbeats_are_cleaned_up(
    harness: LeaseServiceHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await harness.call(wait=seconds(3), seen="queued")
    assert harness.service.clean() == []
    monkeypatch.setattr("arbiter.server.lease_service.LATE_S", -1.0)
    assert harness.service.clean() == [JOB]
    assert harness.shell.core.state_of(JOB) == "reclaiming"


async def test_ended_lease_whose_client_left_is_swept(
    harness: LeaseServiceHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await harness.call(wait=seconds(3), seen="queued")
    harness.shell.feed(ev.EngineGone(NODE, JOB, True))
    monkeypatch.setattr("arbiter.server.lease_service.LATE_S", -1.0)
    harness.service.sweep()
    assert not harness.known


async def test_lease_must_name_its_node_unless_there_is_exactly_one() -> None:
    harness = LeaseServiceHarness()
    harness.shell.feed(ev.NodeSeen(NodeId("m"), ()))
    with pytest.raises(LeaseRefused) as caught:
        await harness.call()
    assert caught.value.field == "node"


async def test_lease_before_any_node_is_known_gets_arbiter_unavailable() -> None:
    harness = LeaseServiceHarness()
    harness.shell.feed(ev.NodeLost(NODE))
    with pytest.raises(ArbiterUnavailable):
        await harness.call()


FREES = replace(TERMS, preemptible=False, notice=seconds(0), frees=True)


async def freed(harness: LeaseServiceHarness, **more: Any) -> dict[str, Any]:
    call = messages.LeaseCall(
        "gpu", gib(100), replace(FREES, **more), "gpu", seen="queued", wait=seconds(3)
    )
    async with asyncio.timeout(60):
        return await harness.service.free(call, is_kept=True)


async def test_what_is_freed_is_held_without_heartbeats_until_its_term_ends(
    harness: LeaseServiceHarness,
) -> None:
    done = await freed(harness, term=seconds(20))
    assert done["lease"]["devices_bytes"] == {CPU: gib(80)}  # as much as there is
    assert (done["plan"]["need_bytes"], done["plan"]["victims"]) == (gib(80), [])
    ticket = TicketId("lease:t:gpu")
    for harness.now in range(1, 20):
        harness.service.sweep()
        assert harness.shell.core.state_of(ticket) == "resident", harness.now
    harness.now = 20.0
    harness.shell.feed(ev.TimerFired())
    await asyncio.sleep(0)  # its revoke is read
    await asyncio.sleep(0)
    harness.service.sweep()
    assert harness.shell.core.state_of(ticket) == "reclaiming"
    assert not harness.known  # the next epoch waits for no process that does not exist


@pytest.mark.spec("A18")
async def test_what_is_held_for_its_term_alone_is_held_by_the_next_epoch_for_the_rest_of_it(
    harness: LeaseServiceHarness,
) -> None:
    await freed(harness, term=seconds(20))
    [saved] = harness.granted
    assert saved.is_kept and saved.devices == (types.DeviceBytes(CPU, gib(80)),)
    left_s = saved.ends_unix_s - time.time()
    after = LeaseServiceHarness(granted=harness.granted)
    after.service.restore()
    [ticket] = after.shell.core.snapshot(Instant(0)).tickets
    assert (ticket.ticket, ticket.state) == ("lease:t:gpu", "resident")
    for after.now in range(1, 15):
        after.service.sweep()
        assert after.shell.core.state_of(ticket.ticket) == "resident", after.now
    after.now = left_s + 1
    await ended(after)
    assert after.shell.core.state_of(ticket.ticket) == "reclaiming" and not after.granted


async def ended(harness: LeaseServiceHarness) -> None:
    """Its notice is told, read and obeyed."""
    harness.shell.feed(ev.TimerFired())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    harness.service.sweep()


@pytest.mark.spec("A18")
async def test_a_drained_lease_that_no_process_holds_is_not_held_by_the_next_epoch(
    harness: LeaseServiceHarness,
) -> None:
    """Also where the arbiter restarts at once, before it looks at its leases again."""
    await freed(harness, term=seconds(300))
    harness.shell.feed(ev.UnloadAsked(TicketId("lease:t:gpu")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert harness.shell.core.state_of(TicketId("lease:t:gpu")) == "reclaiming"
    assert not harness.granted


@pytest.mark.spec("A18")
async def test_notice_by_hand_that_its_holder_has_not_heard_is_given_by_the_next_epoch(
    harness: LeaseServiceHarness,
) -> None:
    await harness.call(wait=seconds(3), seen="queued")
    harness.shell.feed(ev.UnloadAsked(JOB))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    held = harness.granted[0].devices
    after = LeaseServiceHarness(frozenset({HolderId(JOB)}), harness.granted)
    said = await after.call(devices=held, seen="held", wait=seconds(3))
    assert (said.state, said.reason) == ("leaving", "manual")
    assert (await after.call(devices=held, users_count=1)).state == "held", "it is in use"
    last = LeaseServiceHarness(frozenset({HolderId(JOB)}), after.granted)
    assert (await last.call(devices=held)).state == "held", "and the notice was answered"


@pytest.mark.spec("A18")
@pytest.mark.parametrize("is_kept", [True, False])
async def test_what_left_for_a_lease_returns_after_it_also_in_the_next_epoch(is_kept: bool) -> None:
    """Its term was over before the arbiter was back, and so perhaps was its process."""
    left = (types.ModelName("text", "a"),)
    saved = granted_before(left_s=-1, terms=FREES, is_kept=is_kept, returning=left)
    expected = frozenset() if is_kept else frozenset({HolderId(JOB)})
    after = LeaseServiceHarness(expected, (saved,))
    spec = types.ModelSpec("a", seconds(60))
    text = types.CapabilitySpec("text", "text", "fake", (spec,), seconds(300))
    after.shell.feed(ev.CapabilitiesSet((text,)))
    after.service.restore()
    if not is_kept:
        after.now = in_seconds(PLAIN.timeouts.lost)
        after.read()
        after.service.sweep()
    await asyncio.sleep(0)  # it listens
    await ended(after)
    assert after.shell.core.state_of(JOB) in ("reclaiming", "closed") and not after.granted
    assert after.shell.core.replica_targets(Instant(int(after.now * 1e9)))["text"] == 1
    told = await after.shell.log.after(0, 0.0)
    assert "freed_return" in [row["kind"] for row in told]


@pytest.mark.spec("A18")
async def test_lease_given_back_to_the_next_epoch_before_any_other_call_is_over() -> None:
    left = (types.ModelName("text", "a"),)
    saved = granted_before(left_s=3600, terms=FREES, returning=left)
    after = LeaseServiceHarness(frozenset({HolderId(JOB)}), (saved,))
    after.service.give_back("job", "t")
    assert after.shell.core.state_of(JOB) == "reclaiming"
    assert not (after.granted or after.shell.core.awaited or after.known)
    with pytest.raises(UnknownLease):
        after.service.give_back("job", "other")
    after.shell.feed(ev.EngineGone(NODE, JOB, bytes_back=True))
    told = await after.shell.log.after(0, 0.0)
    assert "lease_ended" in [row["kind"] for row in told]


async def test_freeing_again_under_the_same_name_is_one_lease_with_the_first_plan(
    harness: LeaseServiceHarness,
) -> None:
    first = await freed(harness)
    assert await freed(harness) == first
    harness.service.give_back("gpu", "t")
    with pytest.raises(LeaseRefused, match="is over"):
        await freed(harness)


async def test_a_refused_request_to_free_leaves_nothing_behind(
    harness: LeaseServiceHarness,
) -> None:
    harness.shell.feed(ev.NodeSeen(NodeId("m"), ()))
    for _ in range(2):
        with pytest.raises(LeaseRefused, match="node"):
            await freed(harness)
    assert not harness.service._plans
    harness.shell.feed(ev.NodeLost(NodeId("m")))
    assert (await freed(harness))["plan"]["need_bytes"] == gib(80)


async def test_the_lease_of_a_process_is_not_freed_under_its_id(
    harness: LeaseServiceHarness,
) -> None:
    await harness.service.update(messages.LeaseCall("gpu", gib(30), TERMS, "job"))
    with pytest.raises(LeaseRefused, match="did not begin"):
        await freed(harness)
