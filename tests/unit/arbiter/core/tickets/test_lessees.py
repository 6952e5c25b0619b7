"""What is taken of a lease by a process that no agent measures (A15)."""

from dataclasses import replace

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.units import Bytes, HolderId, NodeId, Span, TicketId, seconds
from tests.support.core_driver import CPU, PLAIN, CoreDriver, gib, listed

pytestmark = pytest.mark.spec("A15")
WHOLE = replace(PLAIN, lease_tenant_fraction=1.0)


def read(driver: CoreDriver, t: float, foreign: float) -> float:
    """GiB that are free after a reading."""
    driver.foreign = {CPU: foreign}
    driver.read(t)
    return driver.free()


def leased(foreign: float = 0, size: float = 30) -> CoreDriver:
    """Of 80."""
    driver = CoreDriver(settings=WHOLE)
    assert read(driver, 0, foreign) == 80 - foreign
    driver.lease(0, "job", size)
    return driver


@pytest.mark.parametrize(
    ("foreign", "free"),
    [(10, 40), (25, 40), (40, 40), (50, 30), (80, 0), (4, 40 + 6)],
    ids=["nothing taken", "a part", "all", "more", "all there is", "another process has left"],
)
def test_what_becomes_foreign_under_a_lease_counts_once(foreign: float, free: float) -> None:
    driver = leased(foreign=10)
    assert driver.free() == 40
    assert read(driver, 1, foreign) == free


def test_lease_covers_what_comes_after_another_process_has_left() -> None:
    driver = leased(foreign=10)
    assert read(driver, 1, 0) == 50
    assert read(driver, 2, 20) == 50
    assert read(driver, 3, 40) == 40


def test_where_the_process_is_measured_nothing_foreign_is_its_own() -> None:
    driver = leased()
    driver.engines["job"] = {}
    assert read(driver, 1, 10) == 40
    driver.engines["job"] = {CPU: 20}
    assert read(driver, 2, 10) == 40


def test_two_leases_cover_their_sum_and_the_rest_is_foreign_once_one_ends() -> None:
    driver = leased(size=20)
    assert read(driver, 1, 5) == 60
    driver.lease(1, "more", 10)
    assert driver.free() == 50
    assert read(driver, 2, 30) == 50
    assert read(driver, 3, 34) == 46
    driver.at(4, ev.Released(TicketId("job"), "released"))
    driver.gone(4, "job")
    assert read(driver, 5, 34) == 80 - 34
    assert read(driver, 6, 24) == 80 - 24


def test_queued_lease_covers_nothing() -> None:
    driver = leased(size=20)
    driver.lease(1, "waits", 70, tenant="u")
    assert driver.state_of("waits") == "queued"
    assert read(driver, 3, 50) == 80 - 50


def test_what_a_lessee_keeps_counts_at_once_when_its_lease_is_over() -> None:
    driver = leased(size=60)
    assert read(driver, 1, 50) == 20
    driver.at(2, ev.Released(TicketId("job"), "released"))
    assert driver.free() == 20
    driver.gone(2, "job")
    assert driver.free() == 30


@pytest.mark.spec("A18")
@pytest.mark.parametrize(("before", "free"), [((10.0,), 40.0), ((), 80 - 25 - 30)])
def test_next_epoch_goes_on_with_what_was_foreign_before(
    before: tuple[float, ...], free: float
) -> None:
    """What it is not told of counts beside the lease, because it may be another process's."""
    driver = CoreDriver(settings=WHOLE, known=("lease:job",))
    terms = types.LeaseConditions("t", seconds(50), seconds(5))
    history = types.LeaseHistory(tuple(types.DeviceBytes(CPU, gib(size)) for size in before))
    held = ev.HeldTicket(
        TicketId("job"), "job", types.Phase.RESIDENT, 0, Span(0), listed({CPU: 30}),
        types.Need(Bytes(gib(30))), lease=terms, lease_history=history,
    )  # fmt: skip
    driver.at(1, ev.Joined(HolderId("lease:job"), NodeId("n"), "lease", (held,)))
    assert read(driver, 2, 25) == free
    told = driver.arbiter.lease_history(TicketId("job"))
    assert told.foreign_before == listed({CPU: before[0] if before else 25})
