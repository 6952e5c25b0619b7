"""What an arbiter hands to the next one through the state file, without Ray."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arbiter.core import events as ev
from arbiter.core.decisions import DropSlabs, DropTenant
from arbiter.core.types import (
    CapabilitySpec,
    DeviceBytes,
    Floor,
    GrantCheck,
    ModelSpec,
    Need,
    Phase,
)
from arbiter.errors import CapabilityConflict, UnknownCapability, UnknownRole
from arbiter.server.actor import ArbiterActor
from arbiter.server.store import ExpectedHolder, Store
from arbiter.units import (
    Bytes,
    DeviceId,
    HolderId,
    Instant,
    NodeId,
    Span,
    TicketId,
    in_seconds,
    seconds,
)
from deployments.config.boot import configuration
from deployments.config.schema import parse_table
from tests.support.local_arbiter import TABLE, Running

VAD = CapabilitySpec("vad", "vad", "m:f", (ModelSpec("silero", seconds(60)),), seconds(300))


def names(actor: ArbiterActor) -> set[str]:
    return set(actor._shell.core.replica_targets(actor._shell.core._state.now))


async def kinds(actor: ArbiterActor) -> list[str]:
    return [line["kind"] for line in await actor.events(0, 0)]


@pytest.mark.spec("A2", "A18")
async def test_registered_capability_is_known_to_the_next_epoch_until_it_is_removed(
    running: Running,
) -> None:
    async with running() as first:
        await first.register(VAD)
        await first.register(VAD)  # repeated: nothing
        async with running() as second:
            assert names(second) == {"c", "vad"}
            await second.unregister("vad")
            with pytest.raises(UnknownCapability):
                await second.unregister("vad")
            async with running() as third:
                assert names(third) == {"c"}


@pytest.mark.spec("A2", "A18")
async def test_registration_that_a_table_repeats_outlives_the_arbiter_and_that_table(
    running: Running,
) -> None:
    """Python registers it, the table names it, the arbiter restarts, the table drops it."""
    models = {"silero": {"source": "x", "keep_warm_s": 60}}
    vad = {"role": "vad", "engine": "m:f", "models": models, "downscale_to_zero_s": 300}
    capabilities: dict[str, Any] = TABLE["capabilities"]
    both = configuration(parse_table({"capabilities": capabilities | {"vad": vad}}))
    [spec] = [spec for spec in both.capabilities.capabilities if spec.name == "vad"]
    async with running() as first:
        await first.register(spec)
        await first.configure(both)
        async with running() as second:
            await second.configure(configuration(parse_table(TABLE)))
            assert names(second) == {"c", "vad"}
            async with running() as third:
                assert names(third) == {"c", "vad"}


@pytest.mark.spec("A2", "C12")
async def test_table_that_conflicts_with_a_registration_is_refused_and_not_kept(
    running: Running,
) -> None:
    own = {"role": "text", "engine": "m:f", "models": {"b": {"source": "x"}}}
    wanted = configuration(parse_table({"capabilities": {"vad": own}}))
    async with running() as first:
        await first.register(VAD)
        with pytest.raises(CapabilityConflict, match="other role"):
            await first.configure(wanted)
        async with running() as second:
            assert names(first) == names(second) == {"c", "vad"}


@pytest.mark.spec("C1", "C12")
async def test_role_and_a_capability_of_it_come_with_one_change_of_the_settings(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ArbiterActor, "_begin_anew", lambda self, why: None)
    wiki = {"role": "wiki", "engine": "m:f", "models": {"w": {"source": "x"}}}
    b = {"role": "text", "engine": "m:f", "models": {"b": {"source": "x"}}}
    roles = {"wiki": {"rank": 1, "act": "its pages are missing"}}
    wanted = configuration(
        parse_table({"arbiter": {"roles": roles}, "capabilities": {"c": b, "pages": wiki}})
    )
    async with running() as actor:
        await actor.set_floor("c", "a", Floor.DEVICE)
        await actor.change_settings(wanted, (await actor.state())["generation"])
        async with running() as successor:
            core = successor._shell.core
            assert set(core.replica_targets(core._state.now)) == {"c", "pages"}
            assert core.export_floors() == [], "its model was removed by the same change"


@pytest.mark.spec("D9", "A18")
async def test_next_arbiter_knows_which_models_are_being_removed(running: Running) -> None:
    b = {"role": "text", "engine": "m:f", "models": {"b": {"source": "x"}}}
    held = ev.HeldTicket(TicketId("t"), "a", Phase.RESIDENT, 1, Span(0), (), Need(Bytes(1)))
    async with running() as actor:
        actor._store.add_member(ExpectedHolder(HolderId("h"), NodeId("n")))
        actor._shell.feed(ev.Joined(HolderId("h"), NodeId("n"), "c", (held,)))
        await actor.configure(configuration(parse_table({"capabilities": {"c": b}})))
        assert actor._shell.core.export_removing() == [["c", "a"]]
        async with running() as successor:
            assert successor._shell.core.export_removing() == [["c", "a"]]
            await successor.configure(configuration(parse_table(TABLE)))
            assert successor._shell.core.export_removing() == [["c", "b"]], "`a` is back"
            async with running() as third:
                assert third._shell.core.export_removing() == [["c", "b"]]


@pytest.mark.spec("A2", "C12")
async def test_change_that_takes_the_role_of_a_registered_capability_is_refused(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ArbiterActor, "_begin_anew", lambda self, why: None)
    roles = {"wiki": {"rank": 1, "act": "its pages are missing"}}
    async with running(TABLE | {"arbiter": {"roles": roles}}) as actor:
        generation = (await actor.state())["generation"]
        await actor.register(replace(VAD, role="wiki"))
        with pytest.raises(UnknownRole, match="wiki"):
            await actor.change_settings(configuration(parse_table(TABLE)), generation)
        assert (await actor.state())["generation"] == generation


@pytest.mark.spec("E6")
async def test_next_arbiter_knows_when_tenants_were_removed(running: Running) -> None:
    async with running() as first:
        await first.remove_tenant("acme")
        async with running() as second:
            core = second._shell.core
            told = core.handle(ev.NodeSeen(NodeId("late"), ()), core._state.now)
    [order] = [decision for decision in told if isinstance(decision, DropTenant)]
    assert order.tenant == "acme" and 0 <= in_seconds(order.ago) < 60


@pytest.mark.spec("D9")
async def test_next_arbiter_knows_which_models_were_removed(running: Running) -> None:
    b = {"role": "text", "engine": "m:f", "models": {"b": {"source": "x"}}}
    async with running() as first:
        await first.configure(configuration(parse_table({"capabilities": {"c": b}})))
        first._watch.save_all()
        async with running() as second:
            core = second._shell.core
            told = core.handle(ev.NodeSeen(NodeId("late"), ()), core._state.now)
    assert [d for d in told if isinstance(d, DropSlabs)] == [DropSlabs(NodeId("late"), "c/a")]


@pytest.mark.spec("A2")
async def test_stored_registration_that_the_table_contradicts_is_reported(
    running: Running, tmp_path: Path
) -> None:
    Store(tmp_path / "state", "session").save_registered((replace(VAD, name="c"),))
    async with running() as actor:
        assert names(actor) == {"c"} and "registration_lost" in await kinds(actor)


@pytest.mark.spec("A2")
async def test_stored_registrations_of_other_code_are_reported_as_lost(
    running: Running, tmp_path: Path
) -> None:
    store = Store(tmp_path / "state", "session")
    store.save_registered((VAD,))
    assert store.registered() == (VAD,)
    store._save_fact("registered", b'[{"name": "vad", "colour": "blue"}]')
    async with running() as actor:
        lost = [e for e in await actor.events(0, 0) if e["kind"] == "registration_lost"]
        assert names(actor) == {"c"} and ["role" in line["cause"] for line in lost] == [True]
        assert "state_not_kept" not in await kinds(actor)


@pytest.mark.spec("C11", "A17")
async def test_usage_and_estimates_are_known_to_the_next_epoch(running: Running) -> None:
    name = ("c", "a")
    async with running() as first:
        state = first._shell.core._state
        state.usage.rates.used(name, 5, state.now)
        state.usage.transition_counts[name] = {("c", "b"): 3}
        state.estimates.note_turnover("c", seconds(4))
        first._watch.save_all()
        async with running() as second:
            later = second._shell.core._state
            assert later.usage.rates.recent(name, Instant(state.now)) == 5
            assert later.usage.transition_counts == state.usage.transition_counts
            assert later.estimates.turnover("c") == seconds(4)


@pytest.mark.spec("A3")
async def test_check_of_a_ticket_counts_as_a_message(running: Running) -> None:
    async with running() as actor:
        before = actor._shell.calls_count
        check = await actor.check_grant(NodeId("n"), TicketId("t"))
        assert check is GrantCheck.SETTLING and actor._shell.calls_count == before + 1


@pytest.mark.spec("A20")
async def test_shutdown_waits_for_open_tickets_without_a_snapshot(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = (DeviceBytes(DeviceId("n/cpu:0"), Bytes(5)),)
    need, state = Need(Bytes(5)), Phase.RESIDENT
    held = ev.HeldTicket(TicketId("t"), "a", state, 1, Span(0), on, need, "")
    async with running() as actor:
        shell = actor._shell
        monkeypatch.setattr(shell.core, "snapshot", lambda now: pytest.fail("a snapshot to count"))
        shell.feed(ev.Joined(HolderId("h"), NodeId("n"), "c", (held,)))
        assert shell.open_tickets == 1
        async with asyncio.timeout(60):
            assert await actor.close(0.05) == 1  # it waits in vain
            closing = asyncio.ensure_future(actor.close(1_000))
            await asyncio.sleep(0)
            assert not closing.done()
            shell.feed(ev.Released(TicketId("t"), "manual", HolderId("h")))
            shell.feed(ev.EngineGone(NodeId("n"), TicketId("t"), True))
            assert await closing == 0


@pytest.mark.spec("D8", "A18")
async def test_load_by_hand_that_waits_for_its_replica_is_known_to_the_next_epoch(
    running: Running,
) -> None:
    async with running() as actor:
        await actor.load("c", "a")
        async with running() as successor:
            assert successor._shell.core.export_asked() == [["c", "a"]]
            await successor.set_floor("c", "a", Floor.COLD)
            successor._watch.save_asked()
            async with running() as third:
                assert third._shell.core.export_asked() == []
