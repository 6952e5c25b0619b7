"""The arbiter's wire, driven without Ray."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from ray.exceptions import OwnerDiedError, RayActorError

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.errors import OutsideHours, SettingsConflict, StaleEpoch, TicketClosed
from arbiter.metrics.series import from_plain
from arbiter.protocol import messages
from arbiter.server import shell
from arbiter.server.actor import ArbiterActor
from arbiter.server.lease_service import LeaseService
from arbiter.server.node_agents import RayAgents
from arbiter.server.store import ExpectedHolder, Store
from arbiter.units import Bytes, Epoch, HolderId, NodeId, TicketId, seconds
from deployments.config.boot import configuration
from deployments.config.schema import parse_table
from tests.support.core_driver import CPU, NODE, gib
from tests.support.fake_arbiter import never
from tests.support.heap_trims import begun_trims
from tests.support.hours import hours_away
from tests.support.local_arbiter import TABLE, Running

H = HolderId("h")


async def join(actor: ArbiterActor, stay: str) -> asyncio.Future[None]:
    """As a client does: its pending keepalive goes along."""
    call = asyncio.ensure_future(actor.keepalive(stay))
    await actor.join(ev.Joined(H, NodeId("n"), "c", ()), stay, [], [call])
    return call


async def ended(call: asyncio.Future[None]) -> None:
    async with asyncio.timeout(60):
        await asyncio.shield(call)


@pytest.mark.spec("A18")
async def test_ended_session_leaves_no_pending_keepalive(running: Running) -> None:
    async with running() as actor:
        first = await join(actor, "1")
        second = await join(actor, "2")
        await ended(first)
        assert not second.done() and actor._shell.has_mail(H)
        await actor.tell(actor._shell.epoch, H, ev.HolderLost(H))
        await ended(second)
        assert not actor._sessions._ends


@pytest.mark.spec("A15", "A18")
async def test_leases_are_looked_at_while_ray_does_not_say_what_nodes_there_are(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept = asyncio.Event()
    monkeypatch.setattr(RayAgents, "look", never)
    monkeypatch.setattr(LeaseService, "sweep", lambda service: swept.set())
    async with running():
        for _ in range(2):
            async with asyncio.timeout(60):
                await swept.wait()
            swept.clear()


@pytest.mark.spec("C12")
async def test_settings_change_once_per_generation_and_a_reread_file_undoes_nothing(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(ArbiterActor, "_begin_anew", lambda self, why: begun.append(why))
    written = configuration(parse_table(TABLE))
    wanted = configuration(parse_table(TABLE | {"arbiter": {"bypass_count": 3}}))
    async with running() as actor:
        first = (await actor.state())["generation"]
        assert await actor.change_settings(wanted, first) == first + 1
        assert await actor.change_settings(wanted, first) == first + 1  # said twice, done once
        with pytest.raises(SettingsConflict) as caught:
            await actor.change_settings(written, first)
        assert caught.value.current == first + 1 and begun == ["settings changed"]
        await actor.configure(written)
        assert actor._configuration.current.settings.bypass_count == 3
    async with running() as actor:  # the next life goes on with it, as its file is the same
        assert (await actor.state())["generation"] == first + 1
        again = configuration(parse_table(TABLE | {"arbiter": {"bypass_count": 5}}))
        await actor.configure(again)
        assert actor._configuration.current.settings.bypass_count == 5
        assert (await actor.state())["generation"] == first + 2


@pytest.mark.spec("A18", "K3")
async def test_recording_begins_one_epoch_though_it_is_asked_for_again(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its client does where the answer was lost: the arbiter ends right after it."""
    begun: list[str] = []
    monkeypatch.setattr(ArbiterActor, "_begin_anew", lambda self, why: begun.append(why))
    file = str(tmp_path / "recording")
    async with running() as actor, running() as second, running() as third:
        await actor.record(file, actor._shell.epoch)
        await second.record(file, actor._shell.epoch)
        await second.record(None, second._shell.epoch)
        await third.record(None, second._shell.epoch)
    assert begun == ["recording", "no longer recording"]
    async with running() as actor:  # another caller's, of another epoch
        of = actor._shell.epoch
        await actor.record(file, Epoch(of - 1))
        async with running() as successor:
            await successor.record(None, of)
    assert begun[2:] == ["recording", "no longer recording"]


async def test_no_epoch_begins_where_a_recording_ends_that_never_began(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(ArbiterActor, "_begin_anew", lambda self, why: begun.append(why))
    async with running() as actor:
        await actor.record(None, actor._shell.epoch)
    assert begun == []


@pytest.mark.spec("A18")
async def test_keepalive_of_a_replaced_session_returns(
    running: Running,
) -> None:
    async with running() as actor:
        forever = asyncio.ensure_future(asyncio.Event().wait())
        joined = ev.Joined(H, NodeId("n"), "c", ())
        await actor.join(joined, "1", [], [forever])
        second = await join(actor, "2")
        async with asyncio.timeout(60):
            await actor.keepalive("1")
        assert not second.done()
        forever.cancel()
        await actor.tell(actor._shell.epoch, H, ev.HolderLost(H))


@pytest.mark.spec("A19")
async def test_dead_holder_breaks_its_keepalive_and_is_lost(running: Running) -> None:
    async with running() as actor:
        broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        joined = ev.Joined(H, NodeId("n"), "c", ())
        await actor.join(joined, "1", [], [broken])
        broken.set_exception(OwnerDiedError("", "", ""))
        async with asyncio.timeout(60):
            while actor._shell.has_mail(H):
                await asyncio.sleep(0)


@pytest.mark.spec("A9", "A14")
async def test_holder_that_joins_learns_the_times_that_a_person_set(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TABLE, "arbiter", {"barrier_s": 60, "load_timeout_s": 90})
    async with running() as actor:
        forever = asyncio.ensure_future(asyncio.Event().wait())
        joined = ev.Joined(H, NodeId("n"), "c", ())
        welcome = await actor.join(joined, "1", [], [forever])
        assert (welcome.timeouts.barrier, welcome.timeouts.load) == (seconds(60), seconds(90))
        forever.cancel()
        await actor.tell(actor._shell.epoch, H, ev.HolderLost(H))


@pytest.mark.spec("A5")
async def test_holder_that_counts_as_dead_is_told_to_rejoin_with_its_next_heartbeat(
    running: Running,
) -> None:
    async with running() as actor:
        call, epoch = await join(actor, "1"), actor._shell.epoch
        await actor.renew(epoch, ev.Renewed(H, ()))
        actor._shell.feed(ev.HolderLost(H))  # as after a silence of 10 s
        with pytest.raises(StaleEpoch):
            await actor.renew(epoch, ev.Renewed(H, ()))
        await ended(call)
        await join(actor, "2")
        await actor.renew(epoch, ev.Renewed(H, ()))


async def join_and_leave_unread(
    actor: ArbiterActor, monkeypatch: pytest.MonkeyPatch
) -> tuple[asyncio.Future[None], Epoch]:
    """Has a holder join and read none of more commands than its mailbox takes. Returns the call
    that listens, and the epoch."""
    most = -actor._shell.core.settings.queue_total_count + 1
    monkeypatch.setattr(shell, "COMMANDS_BESIDE_QUEUE_COUNT", most)
    first, epoch = await join(actor, "1"), actor._shell.epoch
    for model in "ab":
        await actor.resize(messages.Resize(model, messages.ModelSize.GROWN))
    return first, epoch


@pytest.mark.spec("A18")
async def test_holder_that_left_its_commands_unread_is_alive_and_only_rejoins(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running() as actor:
        first, epoch = await join_and_leave_unread(actor, monkeypatch)
        await actor.tell(epoch, H, ev.Slept(TicketId("t")))  # its requests are no death of it
        for heard in (actor.listen(H, epoch, 0), actor.renew(epoch, ev.Renewed(H, ()))):
            with pytest.raises(StaleEpoch):
                await heard
        assert actor._shell.core.has_joined(H)
        await join(actor, "2")
        await ended(first)
        await actor.renew(epoch, ev.Renewed(H, ()))
        await actor.tell(epoch, H, ev.HolderLost(H))


@pytest.mark.spec("A18", "C10")
async def test_counts_of_a_heartbeat_that_is_refused_are_taken_once(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder sends them again in its next session."""
    counts = ev.Renewed(H, (), usage=(ev.Usage(types.ANYBODY, 3),))
    async with running() as actor:
        first, epoch = await join_and_leave_unread(actor, monkeypatch)
        with pytest.raises(StaleEpoch):
            await actor.renew(epoch, counts)
        await join(actor, "2")
        await ended(first)
        await actor.renew(epoch, counts)
        [account] = actor._shell.core._state.accounts.rows.values()
        assert account.requests_count == 3
        await actor.tell(epoch, H, ev.HolderLost(H))


GROWN, OWNER, OTHER = TicketId("g"), HolderId("g"), HolderId("idle")
GROWTH = ev.GrowthAsked(GROWN, gib(20), seconds(60))
NO_GROWTH = replace(GROWTH, more_bytes=Bytes(0))


async def begin_growth(actor: ArbiterActor) -> asyncio.Future[messages.Granted]:
    """Has the owner wait for more than is free beside the idle model of another holder."""
    actor._shell.feed(ev.NodeSeen(NODE, (types.DeviceSpec(CPU, types.DeviceKind.CPU, gib(80)),)))
    actor._shell.feed(ev.Measured(NODE, (ev.DeviceReading(CPU, gib(80), gib(0)),), ()))
    for ticket in ("g", "idle"):
        held = ev.HeldTicket(
            TicketId(ticket), "a", types.Phase.RESIDENT, int(ticket == "g"), seconds(100),
            (types.DeviceBytes(CPU, gib(30)),), types.Need(gib(30)),
        )  # fmt: skip
        open_call: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        joined = ev.Joined(HolderId(ticket), NODE, "c", (held,))
        await actor.join(joined, ticket, [], [open_call])
    growing = asyncio.ensure_future(actor.grow(actor._shell.epoch, OWNER, GROWTH))
    await asyncio.sleep(0)
    return growing


async def is_growing(actor: ArbiterActor, growing: asyncio.Future[messages.Granted]) -> bool:
    for _ in range(3):  # as many turns as its answer would take
        await asyncio.sleep(0)
    return not growing.done() and GROWN in actor._shell.core._state.growing


@pytest.mark.spec("A14")
async def test_growth_is_not_ended_by_what_another_holder_asks_for(running: Running) -> None:
    async with running() as actor:
        epoch, growing = actor._shell.epoch, await begin_growth(actor)
        with pytest.raises(TicketClosed):
            await actor.grow(epoch, OTHER, replace(GROWTH, more_bytes=gib(1)))
        with pytest.raises(TicketClosed):
            await actor.acquire(epoch, ev.Requested(GROWN, OTHER, "c", "a", types.Need(gib(1))))
        assert await is_growing(actor, growing)
        await actor.tell(epoch, OTHER, ev.Released(TicketId("idle"), "x"))
        actor._shell.feed(ev.EngineGone(NODE, TicketId("idle"), True))
        async with asyncio.timeout(60):
            assert sum(part.size_bytes for part in (await growing).devices) == gib(50)


@pytest.mark.spec("A14")
async def test_growth_goes_on_when_one_of_two_calls_for_it_is_cancelled(running: Running) -> None:
    async with running() as actor:
        growing = await begin_growth(actor)
        again = asyncio.ensure_future(actor.grow(actor._shell.epoch, OWNER, GROWTH))
        await asyncio.sleep(0)
        growing.cancel()
        assert await is_growing(actor, again)
        again.cancel()
        await asyncio.wait({growing, again}, timeout=60)
        assert GROWN not in actor._shell.core._state.growing


@pytest.mark.spec("A14")
async def test_growth_is_withdrawn_by_its_own_holder_alone(running: Running) -> None:
    async with running() as actor:
        epoch, growing = actor._shell.epoch, await begin_growth(actor)
        await actor.tell(epoch, OTHER, NO_GROWTH)
        assert await is_growing(actor, growing)
        await actor.tell(epoch, OWNER, NO_GROWTH)
        async with asyncio.timeout(60):
            with pytest.raises(TicketClosed):
                await growing
        assert GROWN not in actor._shell.core._state.growing


@pytest.mark.spec("A19")
async def test_holder_that_takes_its_leave_ends_no_other(running: Running) -> None:
    async with running() as actor:
        call, epoch = await join(actor, "1"), actor._shell.epoch
        await actor.tell(epoch, H, ev.HolderLost(HolderId("another")))
        await ended(call)
        assert not actor._shell.core.has_joined(H)


@pytest.mark.spec("A18", "A20")
async def test_arbiter_that_is_being_killed_does_not_count_its_holders_as_lost(
    running: Running, tmp_path: Path
) -> None:
    """Killed, it may see its holders' calls fail before it is gone; they live."""
    async with running() as actor:
        broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        joined = ev.Joined(H, NodeId("n"), "c", ())
        await actor.join(joined, "1", [], [broken])
        [watch] = [t for t in asyncio.all_tasks() if "_watch_holder" in repr(t)]
        broken.set_exception(RayActorError())
        async with asyncio.timeout(60):
            await watch
        assert actor._shell.has_mail(H)
        assert [m.holder for m in Store(tmp_path / "state", "session").members()] == [H]
        await actor.tell(actor._shell.epoch, H, ev.HolderLost(H))


@pytest.mark.spec("A5", "N2")
async def test_sessions_that_are_over_are_forgotten_however_often_a_holder_joins(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arbiter.server.holder_sessions.OVER_KEPT", 8)
    joined = ev.Joined(H, NodeId("n"), "c", ())
    async with running() as actor, asyncio.timeout(60):
        forever = asyncio.ensure_future(asyncio.Event().wait())
        for number in range(100):  # the calls of `keepalive` are lost
            await actor.join(joined, str(number), [], [forever])
        assert not actor._sessions._ends and len(actor._sessions._over) == 8
        await actor.keepalive("98")
        waits = asyncio.ensure_future(actor.keepalive("99"))
        await asyncio.sleep(0)
        assert not waits.done()
        await actor.tell(actor._shell.epoch, H, ev.HolderLost(H))
        await waits
        assert not actor._sessions._ends
        forever.cancel()


@pytest.mark.spec("A18")
async def test_holder_that_died_without_an_arbiter_is_not_awaited(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [ExpectedHolder(HolderId(name), NodeId("n"), 7, 9) for name in ("dead", "living")]
    before = Store(tmp_path / "state", "session")
    for member in members:
        before.add_member(member)

    async def dead(self: RayAgents, asked: list[ExpectedHolder]) -> list[HolderId]:
        return [m.holder for m in asked if m.holder == "dead"]

    monkeypatch.setattr(RayAgents, "dead", dead)
    async with running() as actor, asyncio.timeout(60):
        while "dead" in actor._shell.core.awaited:
            await asyncio.sleep(0)
        assert actor._shell.core.awaited == {"living"}
        assert [m.holder for m in before.members()] == ["living"]


@pytest.mark.spec("K1")
async def test_the_event_file_has_the_events_as_lines(running: Running, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    async with running(event_file=str(path)) as actor:
        told = await actor.events(0, 0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines][: len(told)] == [line["kind"] for line in told]
    assert lines[0]["kind"] == "arbiter_started"


@pytest.mark.spec("A20")
async def test_holder_that_leaves_after_shutdown_causes_no_error(running: Running) -> None:
    async with running() as actor:
        await join(actor, "1")
        log = actor._shell.log
    await actor.tell(actor._shell.epoch, H, ev.HolderLost(H))
    assert "state_not_kept" not in [line["kind"] for line in await log.after(0, 0)]


@pytest.mark.spec("A18")
async def test_state_that_cannot_be_saved_is_reported(running: Running, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    async with running(state_file=str(tmp_path / "file" / "state")) as actor:
        kinds = [line["kind"] for line in await actor.events(0, 0)]
    assert kinds.count("state_not_kept") == 1


@pytest.mark.spec("C13")
async def test_hours_are_known_before_the_table_that_names_them(running: Running) -> None:
    chat = {"role": "text", "engine": "m:f"}
    model = {"source": "x", "hours": hours_away(), "floor": "device"}
    models = {"a": model, "b": {"source": "x"}}
    table = {"capabilities": {"c": chat | {"models": models}}}
    async with running(table) as actor:
        await join(actor, "1")
        [row] = (await actor.state())["hours"]
        assert (row["model"], row["is_open"]) == ("a", False)
        assert 5 * 3600 <= row["left_s"] <= 6 * 3600
        need = types.Need(Bytes(1))
        asked = ev.Requested(TicketId("t"), H, "c", "a", need)
        with pytest.raises(OutsideHours) as caught:
            await actor.acquire(actor._shell.epoch, asked)
        assert caught.value.retry_after_s == pytest.approx(row["left_s"], abs=5)


@pytest.mark.spec("K2")
async def test_metrics_count_what_the_event_log_tells(running: Running) -> None:
    async with running() as actor:
        call = await join(actor, "1")
        counted = from_plain(await actor.metrics())
        assert counted["arbiter_events_total"][("arbiter_started",)] == 1
        assert counted["arbiter_events_total"][("holder_joined",)] == 1
        assert counted["arbiter_holders"] == {("c",): 1}
        assert counted["arbiter_model_state"] == {("c", "a"): 0}
        await actor.tell(actor._shell.epoch, H, ev.HolderLost(H))
        await ended(call)
        assert from_plain(await actor.metrics())["arbiter_holders"] == {("c",): 0}


async def test_freed_heap_of_the_arbiter_is_given_back_while_it_runs(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = begun_trims(monkeypatch)
    async with running():
        async with asyncio.timeout(30):
            await begun.wait()
