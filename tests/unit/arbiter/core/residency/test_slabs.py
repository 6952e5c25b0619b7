"""What the core has nodes do with their pools: erase what removed tenants left."""

from dataclasses import replace

import pytest

from arbiter.core import events as ev
from arbiter.core.decisions import Decision, DropSlabs, DropTenant, ForgetTenant, PurgeCaches
from arbiter.core.residency.slabs import TOLD_AGAIN
from arbiter.units import (
    Bytes,
    Content,
    HolderId,
    NodeId,
    Span,
    TicketId,
    in_seconds,
    seconds,
)
from tests.support.core_driver import CPU, NODE, CoreDriver


@pytest.mark.spec("E6")
def test_every_node_erases_what_a_removed_tenant_left() -> None:
    d = CoreDriver()
    d.at(1, ev.NodeSeen(NodeId("m"), ()))
    assert d.at(2, ev.TenantRemoved("acme")) == [
        ForgetTenant(HolderId("h"), "acme"),  # first, so that its sweep brings nothing back
        DropTenant(NODE, "acme", Span(0)),
        DropTenant(NodeId("m"), "acme", Span(0)),
    ]
    assert d.last("tenant_removed").data == {"tenant": "acme", "nodes": 2}


@pytest.mark.spec("E6")
def test_agent_that_was_away_is_told_since_when_once_it_appears_and_for_a_day() -> None:
    d = CoreDriver()
    d.at(1, ev.TenantRemoved("acme"))
    seen, day_s = ev.NodeSeen(NodeId("m"), ()), in_seconds(TOLD_AGAIN)
    assert d.at(day_s, seen) == [DropTenant(NodeId("m"), "acme", seconds(day_s - 1))]
    assert d.at(day_s + 1, seen) == []


@pytest.mark.spec("E6", "G5")
def test_holder_that_was_away_is_told_once_it_joins_and_for_a_day() -> None:
    """It would warm prefixes of that tenant, which writes rows of them again."""
    d = CoreDriver()
    d.at(1, ev.TenantRemoved("acme"))
    day_s = in_seconds(TOLD_AGAIN)
    assert d.join(day_s, "g") == [ForgetTenant(HolderId("g"), "acme")]
    assert d.join(day_s + 1, "g") == []


def remove(d: CoreDriver, t: float, *models: str) -> list[Decision]:
    specs = [replace(c, models=tuple(m for m in c.models if m.name not in models)) for c in d.table]
    return d.at(t, ev.CapabilitiesSet(tuple(specs)))


@pytest.mark.spec("D9")
def test_agent_that_was_away_is_told_of_a_removed_model_for_a_day_unless_it_is_back() -> None:
    d = CoreDriver()
    day_s = in_seconds(TOLD_AGAIN)
    assert remove(d, 1, "a") == [DropSlabs(NODE, "text/a")]
    seen, told = ev.NodeSeen(NodeId("m"), ()), [DropSlabs(NodeId("m"), "text/a")]
    assert d.at(2, seen) == told
    assert d.at(day_s, seen) == told
    d.at(day_s, ev.CapabilitiesSet(d.table))
    assert d.at(day_s, seen) == []
    remove(d, day_s, "a")
    assert d.at(2 * day_s, seen) == []


@pytest.mark.spec("D9")
def test_removed_models_of_which_no_agent_is_told_any_more_are_not_kept() -> None:
    d = CoreDriver()
    remove(d, 1, "a")
    remove(d, 1 + in_seconds(TOLD_AGAIN), "a", "b")
    assert [row[:2] for row in d.arbiter.export_removed_models()] == [["text", "b"]]


@pytest.mark.spec("D9")
def test_next_epoch_tells_an_agent_of_models_that_were_removed_before_it() -> None:
    d, successor = CoreDriver(), CoreDriver()
    remove(d, 1, "a")
    rows = d.arbiter.export_removed_models()
    assert [row[:2] for row in rows] == [["text", "a"]]
    remove(successor, 5, "a")
    successor.arbiter.restore_removed_models(rows)
    told = successor.at(6, ev.NodeSeen(NodeId("m"), ()))
    assert told == [DropSlabs(NodeId("m"), "text/a")]


@pytest.mark.spec("D9")
def test_next_epoch_knows_no_uses_of_models_that_were_removed_before_it() -> None:
    d, successor = CoreDriver(), CoreDriver()
    d.resident(0, "a", 10)
    usage = d.arbiter.export_usage()  # as it was saved last, before the removal
    successor.arbiter.restore_usage(usage)
    assert [name.model for name in successor.arbiter.used_models] == ["a"]
    successor.arbiter.restore_removed_models([["text", "a", 0]])
    assert successor.arbiter.used_models == []


@pytest.mark.spec("E6")
def test_next_epoch_tells_an_agent_of_tenants_that_were_removed_before_it() -> None:
    d = CoreDriver()
    d.fire_timer(10)
    d.arbiter.restore_removed({"acme": 20.0, "older": in_seconds(TOLD_AGAIN)})
    told = d.at(15, ev.NodeSeen(NodeId("m"), ()))
    assert told == [DropTenant(NodeId("m"), "acme", seconds(25))]


@pytest.mark.spec("E6")
def test_tenant_that_is_removed_twice_was_removed_the_second_time() -> None:
    d = CoreDriver()
    d.at(1, ev.TenantRemoved("acme"))
    d.at(9, ev.TenantRemoved("acme"))
    told = d.at(10, ev.NodeSeen(NodeId("m"), ()))
    assert told == [DropTenant(NodeId("m"), "acme", seconds(1))]


@pytest.mark.spec("E6")
def test_resident_with_rows_of_a_removed_tenant_is_asked_until_they_are_gone() -> None:
    d = CoreDriver()
    d.resident(0, "a", 30)
    d.engines["a"] = {CPU: 30}
    one = (Bytes(1),) * 2
    for second, must_erase in ((1, True), (2, True), (3, False)):
        counts = (Span(0), Span(0), must_erase)
        slab = ev.SlabReading(
            "1", Content.KV, "text/a", "ab", TicketId("a"), *one, 0, 0, 0, 0, 0, 0, 0, *counts
        )
        d.slabs = (slab,)
        asked = [PurgeCaches(TicketId("a"), HolderId("h"), only_slabs=True)] if must_erase else []
        assert d.read(second) == asked


@pytest.mark.spec("E7")
def test_what_a_pool_did_with_each_content_is_in_the_state() -> None:
    d = CoreDriver()
    none = (0,) * 5
    hit = ev.ContentReading(Content.KV, Bytes(5), 2, 3, 1, *none, Span(7), Span(9))
    new = ev.ContentReading(Content.ADAPTER, Bytes(5), 2, 0, 0, *none, Span(0), Span(0))
    d.at(1, ev.Measured(NODE, (), (), contents=(hit, new)))
    shown = d.snapshot().contents
    assert [(row.node, row.content, row.hit_fraction) for row in shown] == [
        (NODE, hit, 0.75),
        (NODE, new, None),
    ]
