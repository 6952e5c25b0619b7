"""Leases: device memory for processes outside Serve, as tickets like any other."""

from dataclasses import replace

import pytest

from arbiter import units
from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Revoke
from arbiter.errors import HolderQuarantined, LeaseRefused, QuotaExceeded
from arbiter.units import GIB, HolderId, NodeId, Span, TicketId, seconds
from tests.unit.desk import (
    CPU,
    PATIENT,
    PLAIN,
    Desk,
    granted,
    is_granted,
    listed,
    reaped,
    refusal,
    revoked,
)

WHOLE = replace(PLAIN, lease_tenant_fraction=1.0)
pytestmark = pytest.mark.spec("A15")


def lease_beat(desk: Desk, t: float, name: str, devices: float) -> list[object]:
    terms = types.LeaseConditions("t", seconds(100), seconds(5))
    held = ev.HeldTicket(
        TicketId(name), name, types.Phase.RESIDENT, 0, Span(0), listed({CPU: devices}),
        types.Need(units.Bytes(0)), lease=terms,
    )  # fmt: skip
    return list(desk.at(t, ev.Renewed(HolderId(f"lease:{name}"), (held,))))


def test_a_lease_is_charged_at_once_and_needs_no_load() -> None:
    desk = Desk(settings=WHOLE)
    assert granted(desk.lease(0, "job", 30)) == ["job"]
    assert desk.state_of("job") == "resident" and desk.free() == 50
    assert desk.last("lease_granted").data["tenant"] == "t"


def test_a_lease_makes_idle_models_leave_and_waits_for_their_bytes() -> None:
    desk = Desk(settings=WHOLE)
    desk.resident(0, "a", 60)
    assert revoked(desk.lease(10, "job", 40)) == [("a", "swap", "gone")]
    desk.at(11, ev.Released(TicketId("a"), "swap"))
    assert desk.state_of("job") == "queued"
    assert granted(desk.gone(12, "a")) == ["job"]


def test_a_lease_that_may_not_be_interrupted_is_no_victim() -> None:
    desk = Desk(settings=WHOLE)
    desk.lease(0, "job", 60)
    assert desk.ask(10, "a", 60) == []
    assert desk.state_of("a") == "queued" and desk.state_of("job") == "resident"


def test_a_model_waits_for_the_end_of_a_lease_and_is_not_told_that_it_never_fits() -> None:
    desk = Desk(settings=WHOLE)
    desk.lease(0, "job", 60)
    desk.ask(1, "a", 60)
    desk.at(2, ev.Released(TicketId("job"), "released"))
    assert is_granted(desk.gone(3, "job"), "a")
    assert desk.last("lease_ended").data["reason"] == "manual"


def test_a_preemptible_lease_gets_notice_and_then_a_deadline() -> None:
    desk = Desk(settings=WHOLE)
    desk.lease(0, "job", 60, preemptible=True, notice_s=5)
    [notice] = [d for d in desk.ask(10, "a", 60) if isinstance(d, Revoke)]
    assert notice.barrier_until == seconds(15)
    lease_beat(desk, 13, "job", 60)
    assert desk.state_of("job") == "draining"
    overdue = desk.woke(17)
    assert reaped(overdue) == ["job"] and desk.state_of("job") == "reclaiming"
    assert desk.last("lease_overdue").size_bytes == 60 * GIB
    assert is_granted(desk.gone(18, "job"), "a")


def test_heartbeats_do_not_renew_a_notice() -> None:
    desk = Desk(settings=WHOLE)
    desk.lease(0, "job", 60, preemptible=True, notice_s=5)
    desk.ask(10, "a", 60)
    for t in (12, 14, 16, 17.5):
        lease_beat(desk, t, "job", 60)
    assert desk.state_of("job") == "reclaiming"


def test_an_idle_model_of_any_role_is_dearer_than_a_preemptible_lease() -> None:
    desk = Desk(settings=WHOLE)
    desk.resident(0, "e1", 30, capability="embedding", model="e1")
    desk.lease(1, "job", 30, preemptible=True)
    assert [r[0] for r in revoked(desk.ask(20, "a", 50))] == ["job"]


def test_a_term_ends_with_notice_in_time() -> None:
    desk = Desk(settings=WHOLE)
    desk.lease(0, "job", 30, term_s=100, notice_s=10)
    desk.woke(80)
    assert desk.state_of("job") == "resident"
    [notice] = [d for d in desk.woke(90) if isinstance(d, Revoke)]
    assert (notice.reason.value, notice.barrier_until) == ("term", seconds(100))


def test_a_term_or_notice_beyond_the_most_is_refused_by_name() -> None:
    desk = Desk(settings=WHOLE)
    assert refusal(desk.lease(0, "x", 1, term_s=90_000)).field == "term_s"
    assert refusal(desk.lease(0, "y", 1, notice_s=500)).field == "notice_s"
    assert isinstance(refusal(desk.lease(0, "z", 0)), LeaseRefused)


def test_a_tenant_has_a_cap_that_counts_what_waits() -> None:
    desk = Desk()  # half of 80 by default
    desk.lease(0, "one", 30)
    error = refusal(desk.lease(1, "two", 20))
    assert isinstance(error, QuotaExceeded) and (error.has, error.bound) == (30 * GIB, 40 * GIB)
    assert granted(desk.lease(2, "three", 20, tenant="u")) == ["three"]
    full = Desk()
    full.resident(0, "a", 70)
    full.beat(1, "a", inflight=1)
    assert granted(full.lease(1, "one", 30)) == []  # it waits
    assert isinstance(refusal(full.lease(1, "two", 20)), QuotaExceeded)
    capped = Desk(settings=replace(PLAIN, lease_tenant_bytes=units.Bytes(10 * GIB)))
    assert isinstance(refusal(capped.lease(0, "one", 11)), QuotaExceeded)


@pytest.mark.spec("A19")
def test_the_process_of_a_lease_dies_and_its_ticket_is_reclaiming_at_once() -> None:
    desk = Desk(settings=WHOLE)
    desk.lease(0, "job", 30)
    desk.gone(1, "job", bytes_back=False)
    assert desk.state_of("job") == "reclaiming" and desk.free() == 50
    desk.gone(1.5, "job")
    assert desk.state_of("job") == "closed" and desk.free() == 80
    assert desk.last("lease_ended").data["reason"] == "lost"


def test_a_lease_without_heartbeats_lapses() -> None:
    desk = Desk(settings=replace(WHOLE, timeouts=replace(PATIENT, lease_lapse=seconds(10))))
    desk.lease(0, "job", 30)
    lease_beat(desk, 8, "job", 30)
    desk.woke(12)
    assert desk.state_of("job") == "resident"
    assert reaped(desk.woke(18.5)) == ["job"]


def test_a_process_that_keeps_its_memory_is_quarantined_with_its_tenant() -> None:
    desk = Desk(settings=WHOLE)
    desk.lease(0, "job", 30)
    desk.engines["job"] = {CPU: 30}
    desk.read(1)
    desk.at(2, ev.Released(TicketId("job"), "released"))
    desk.woke(8)
    assert "quarantine" in desk.kinds() and desk.free() == 50
    assert isinstance(refusal(desk.lease(9, "again", 1)), HolderQuarantined)


def test_what_the_process_really_holds_is_charged_when_it_is_more() -> None:
    desk = Desk(settings=WHOLE)
    desk.lease(0, "job", 30)
    desk.engines["job"] = {CPU: 45}
    desk.read(1)
    assert desk.charged() == 45
    assert desk.arbiter.export_learned() == []


@pytest.mark.spec("A18")
def test_a_lease_rejoins_the_next_life_of_the_arbiter_on_its_terms() -> None:
    desk = Desk(settings=WHOLE, known=("lease:job",))
    terms = types.LeaseConditions("t", seconds(50), seconds(5), preemptible=True)
    held = ev.HeldTicket(
        TicketId("job"), "job", types.Phase.RESIDENT, 0, Span(0), listed({CPU: 30}),
        types.Need(units.Bytes(30 * GIB)), lease=terms,
    )  # fmt: skip
    desk.at(1, ev.Joined(HolderId("lease:job"), NodeId("n"), "lease", (held,)))
    assert desk.state_of("job") == "resident" and desk.free() == 50
    assert [r[0] for r in revoked(desk.ask(20, "a", 60))] == ["job"]


@pytest.mark.spec("A18")
def test_what_a_lease_says_of_its_terms_after_a_restart_is_bounded() -> None:
    desk = Desk(settings=WHOLE, known=("lease:job",))
    terms = types.LeaseConditions("t", seconds(1e6), seconds(1e6))
    held = ev.HeldTicket(
        TicketId("job"), "job", types.Phase.RESIDENT, 0, Span(0), listed({CPU: 30}),
        types.Need(units.Bytes(30 * GIB)), lease=terms,
    )  # fmt: skip
    desk.at(1, ev.Joined(HolderId("lease:job"), NodeId("n"), "lease", (held,)))
    [notice] = [d for d in desk.at(10, ev.UnloadAsked(TicketId("job"))) if isinstance(d, Revoke)]
    assert notice.barrier_until == seconds(130)


def test_a_changed_table_and_keep_warm_leave_leases_alone() -> None:
    desk = Desk(settings=WHOLE, keep_warm_s=1)
    desk.lease(0, "job", 30)
    desk.ask(0, "a", 60)
    desk.lease(1, "waits", 60, tenant="u")
    desk.at(2, ev.CapabilitiesSet(()))
    desk.woke(500)
    assert desk.state_of("job") == "resident" and desk.state_of("waits") == "queued"


def test_a_lease_asked_to_drain_by_hand_gets_its_notice_too() -> None:
    desk = Desk(settings=WHOLE)
    desk.lease(0, "job", 30, notice_s=7)
    [notice] = [d for d in desk.at(10, ev.UnloadAsked(TicketId("job"))) if isinstance(d, Revoke)]
    assert (notice.reason.value, notice.barrier_until) == ("manual", seconds(17))


def test_shutdown_gives_leases_notice() -> None:
    desk = Desk(settings=WHOLE)
    desk.lease(0, "job", 30, notice_s=7)
    assert revoked(desk.at(1, ev.ClosingDown())) == [("job", "shutdown", "gone")]
