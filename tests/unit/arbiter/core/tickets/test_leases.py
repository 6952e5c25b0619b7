"""Leases: device memory for processes outside Serve, as tickets like any other."""

from dataclasses import replace

import pytest

from arbiter import units
from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Revoke
from arbiter.errors import HolderQuarantined, LeaseRefused, QuotaExceeded
from arbiter.units import GIB, HolderId, NodeId, Span, TicketId, seconds
from tests.support.core_driver import (
    CPU,
    PATIENT,
    PLAIN,
    CoreDriver,
    granted,
    is_granted,
    killed,
    listed,
    refusal,
    revoked,
)

WHOLE = replace(PLAIN, lease_tenant_fraction=1.0)
pytestmark = pytest.mark.spec("A15")


def lease_beat(driver: CoreDriver, t: float, name: str, devices: float) -> list[object]:
    terms = types.LeaseConditions("t", seconds(100), seconds(5))
    held = ev.HeldTicket(
        TicketId(name), name, types.Phase.RESIDENT, 0, Span(0), listed({CPU: devices}),
        types.Need(units.Bytes(0)), lease=terms,
    )  # fmt: skip
    return list(driver.at(t, ev.Renewed(HolderId(f"lease:{name}"), (held,))))


def test_a_lease_is_charged_at_once_and_needs_no_load() -> None:
    driver = CoreDriver(settings=WHOLE)
    assert granted(driver.lease(0, "job", 30)) == ["job"]
    assert driver.state_of("job") == "resident" and driver.free() == 50
    assert driver.last("lease_granted").data["tenant"] == "t"


def test_a_lease_makes_idle_models_leave_and_waits_for_their_bytes() -> None:
    driver = CoreDriver(settings=WHOLE)
    driver.resident(0, "a", 60)
    assert revoked(driver.lease(10, "job", 40)) == [("a", "swap", "gone")]
    driver.at(11, ev.Released(TicketId("a"), "swap"))
    assert driver.state_of("job") == "queued"
    assert granted(driver.gone(12, "a")) == ["job"]


def test_a_lease_that_may_not_be_interrupted_is_no_victim() -> None:
    driver = CoreDriver(settings=WHOLE)
    driver.lease(0, "job", 60)
    assert driver.ask(10, "a", 60) == []
    assert driver.state_of("a") == "queued" and driver.state_of("job") == "resident"


def test_a_model_waits_for_the_end_of_a_lease_and_is_not_told_that_it_never_fits() -> None:
    driver = CoreDriver(settings=WHOLE)
    driver.lease(0, "job", 60)
    driver.ask(1, "a", 60)
    driver.at(2, ev.Released(TicketId("job"), "released"))
    assert is_granted(driver.gone(3, "job"), "a")
    assert driver.last("lease_ended").data["reason"] == "manual"


def test_a_preemptible_lease_gets_notice_and_then_a_deadline() -> None:
    driver = CoreDriver(settings=WHOLE)
    driver.lease(0, "job", 60, preemptible=True, notice_s=5)
    [notice] = [d for d in driver.ask(10, "a", 60) if isinstance(d, Revoke)]
    assert notice.barrier_until == seconds(15)
    lease_beat(driver, 13, "job", 60)
    assert driver.state_of("job") == "draining"
    overdue = driver.fire_timer(17)
    assert killed(overdue) == ["job"] and driver.state_of("job") == "reclaiming"
    assert driver.last("lease_overdue").size_bytes == 60 * GIB
    assert is_granted(driver.gone(18, "job"), "a")


def test_heartbeats_do_not_renew_a_notice() -> None:
    driver = CoreDriver(settings=WHOLE)
    driver.lease(0, "job", 60, preemptible=True, notice_s=5)
    driver.ask(10, "a", 60)
    for t in (12, 14, 16, 17.5):
        lease_beat(driver, t, "job", 60)
    assert driver.state_of("job") == "reclaiming"


def test_an_idle_model_of_any_role_is_dearer_than_a_preemptible_lease() -> None:
    driver = CoreDriver(settings=WHOLE)
    driver.resident(0, "e1", 30, capability="embedding", model="e1")
    driver.lease(1, "job", 30, preemptible=True)
    assert [r[0] for r in revoked(driver.ask(20, "a", 50))] == ["job"]


def test_a_term_ends_with_notice_in_time() -> None:
    driver = CoreDriver(settings=WHOLE)
    driver.lease(0, "job", 30, term_s=100, notice_s=10)
    driver.fire_timer(80)
    assert driver.state_of("job") == "resident"
    [notice] = [d for d in driver.fire_timer(90) if isinstance(d, Revoke)]
    assert (notice.reason.value, notice.barrier_until) == ("term", seconds(100))


def test_a_term_or_notice_beyond_the_most_is_refused_by_name() -> None:
    driver = CoreDriver(settings=WHOLE)
    assert refusal(driver.lease(0, "x", 1, term_s=90_000)).field == "term_s"
    assert refusal(driver.lease(0, "y", 1, notice_s=500)).field == "notice_s"
    assert isinstance(refusal(driver.lease(0, "z", 0)), LeaseRefused)


def test_lease_cap_of_a_tenant_counts_queued_leases() -> None:
    driver = CoreDriver()  # half of 80 by default
    driver.lease(0, "one", 30)
    error = refusal(driver.lease(1, "two", 20))
    assert isinstance(error, QuotaExceeded) and (error.has, error.bound) == (30 * GIB, 40 * GIB)
    assert granted(driver.lease(2, "three", 20, tenant="u")) == ["three"]
    full = CoreDriver()
    full.resident(0, "a", 70)
    full.beat(1, "a", inflight=1)
    assert granted(full.lease(1, "one", 30)) == []  # it waits
    assert isinstance(refusal(full.lease(1, "two", 20)), QuotaExceeded)
    capped = CoreDriver(settings=replace(PLAIN, lease_tenant_bytes=units.Bytes(10 * GIB)))
    assert isinstance(refusal(capped.lease(0, "one", 11)), QuotaExceeded)


@pytest.mark.spec("A19")
def test_the_process_of_a_lease_dies_and_its_ticket_is_reclaiming_at_once() -> None:
    driver = CoreDriver(settings=WHOLE)
    driver.lease(0, "job", 30)
    driver.gone(1, "job", bytes_back=False)
    assert driver.state_of("job") == "reclaiming" and driver.free() == 50
    driver.gone(1.5, "job")
    assert driver.state_of("job") == "closed" and driver.free() == 80
    assert driver.last("lease_ended").data["reason"] == "lost"


def test_a_lease_without_heartbeats_lapses() -> None:
    driver = CoreDriver(settings=replace(WHOLE, timeouts=replace(PATIENT, lease_lapse=seconds(10))))
    driver.lease(0, "job", 30)
    lease_beat(driver, 8, "job", 30)
    driver.fire_timer(12)
    assert driver.state_of("job") == "resident"
    assert killed(driver.fire_timer(18.5)) == ["job"]


def test_a_process_that_keeps_its_memory_is_quarantined_with_its_tenant() -> None:
    driver = CoreDriver(settings=WHOLE)
    driver.lease(0, "job", 30)
    driver.engines["job"] = {CPU: 30}
    driver.read(1)
    driver.at(2, ev.Released(TicketId("job"), "released"))
    driver.at(2, ev.HolderLost(HolderId("lease:job")))  # as the lease service says of each release
    driver.fire_timer(8)
    assert "quarantine" in driver.kinds() and driver.free() == 50
    assert isinstance(refusal(driver.lease(9, "again", 1)), HolderQuarantined)


def test_memory_that_a_leased_process_keeps_counts_against_its_tenants_cap() -> None:
    driver = CoreDriver(settings=replace(WHOLE, lease_tenant_bytes=units.Bytes(40 * GIB)))
    driver.lease(0, "job", 30)
    driver.engines["job"] = {CPU: 30}
    driver.read(1)
    driver.at(2, ev.Released(TicketId("job"), "released"))
    driver.at(2, ev.HolderLost(HolderId("lease:job")))
    assert isinstance(refusal(driver.lease(3, "again", 20)), QuotaExceeded)


def test_leased_process_that_holds_more_is_charged_what_it_holds() -> None:
    driver = CoreDriver(settings=WHOLE)
    driver.lease(0, "job", 30)
    driver.engines["job"] = {CPU: 45}
    driver.read(1)
    assert driver.charged() == 45
    assert driver.arbiter.export_learned() == []


@pytest.mark.spec("A18")
def test_lease_rejoins_the_next_epoch_on_its_conditions() -> None:
    driver = CoreDriver(settings=WHOLE, known=("lease:job",))
    terms = types.LeaseConditions("t", seconds(50), seconds(5), preemptible=True)
    held = ev.HeldTicket(
        TicketId("job"), "job", types.Phase.RESIDENT, 0, Span(0), listed({CPU: 30}),
        types.Need(units.Bytes(30 * GIB)), lease=terms,
    )  # fmt: skip
    driver.at(1, ev.Joined(HolderId("lease:job"), NodeId("n"), "lease", (held,)))
    assert driver.state_of("job") == "resident" and driver.free() == 50
    assert [r[0] for r in revoked(driver.ask(20, "a", 60))] == ["job"]


@pytest.mark.spec("A18")
def test_conditions_that_a_rejoining_lease_reports_are_bounded() -> None:
    driver = CoreDriver(settings=WHOLE, known=("lease:job",))
    terms = types.LeaseConditions("t", seconds(1e6), seconds(1e6))
    held = ev.HeldTicket(
        TicketId("job"), "job", types.Phase.RESIDENT, 0, Span(0), listed({CPU: 30}),
        types.Need(units.Bytes(30 * GIB)), lease=terms,
    )  # fmt: skip
    driver.at(1, ev.Joined(HolderId("lease:job"), NodeId("n"), "lease", (held,)))
    [notice] = [d for d in driver.at(10, ev.UnloadAsked(TicketId("job"))) if isinstance(d, Revoke)]
    assert notice.barrier_until == seconds(130)


def test_a_changed_table_and_keep_warm_leave_leases_alone() -> None:
    driver = CoreDriver(settings=WHOLE, keep_warm_s=1)
    driver.lease(0, "job", 30)
    driver.ask(0, "a", 60)
    driver.lease(1, "waits", 60, tenant="u")
    driver.at(2, ev.CapabilitiesSet(()))
    driver.fire_timer(500)
    assert driver.state_of("job") == "resident" and driver.state_of("waits") == "queued"


def test_a_lease_asked_to_drain_by_hand_gets_its_notice_too() -> None:
    driver = CoreDriver(settings=WHOLE)
    driver.lease(0, "job", 30, notice_s=7)
    [notice] = [d for d in driver.at(10, ev.UnloadAsked(TicketId("job"))) if isinstance(d, Revoke)]
    assert (notice.reason.value, notice.barrier_until) == ("manual", seconds(17))


def test_shutdown_gives_leases_notice() -> None:
    driver = CoreDriver(settings=WHOLE)
    driver.lease(0, "job", 30, notice_s=7)
    assert revoked(driver.at(1, ev.ClosingDown())) == [("job", "shutdown", "gone")]
