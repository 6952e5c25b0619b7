"""Errors survive a process border and compare by value."""

import inspect
import pickle

import pytest

from arbiter import errors
from arbiter.errors import RequestError
from arbiter.units import (
    GIB,
    Bytes,
    Epoch,
    Generation,
    HolderId,
    NodeId,
    TicketId,
)

ERRORS = [
    errors.UnknownCapability("x", ("a",)),
    errors.UnknownModel("x", "text", ("a", "b")),
    errors.UnknownRole("poet", "odes", ("text",)),
    errors.UnknownTicket(TicketId("t")),
    errors.CapabilityConflict("text", "role"),
    errors.NeverFits(TicketId("a"), Bytes(90 * GIB), Bytes(80 * GIB)),
    errors.DeadlineUnmet(TicketId("a"), 5.0, 2.0),
    errors.OutsideHours("a", "22:00-07:00", 60.0),
    errors.QueueFull("a", 3, 3, 1.0),
    errors.ModelCoolingDown("a", "bad weights", 2.0),
    errors.LoadFailed("a", "bad weights", False),
    errors.EngineLost("a", TicketId("t")),
    errors.ReplicaLost("a"),
    errors.CapabilityFailed("a", "it has no application"),
    errors.HolderQuarantined(HolderId("h"), Bytes(5)),
    errors.LeaseRefused("pid", "1 is no process"),
    errors.UnknownLease("job"),
    errors.HostRamShort("embedding/a", Bytes(5), Bytes(4)),
    errors.UnknownHostCopy("0123abcd"),
    errors.GrowthRefused(TicketId("a"), Bytes(5), "it is leaving"),
    errors.NotResident("a", "text", "cold"),
    errors.RolePinned("a", "text", NodeId("n"), "b"),
    errors.UnderPressure(NodeId("n"), Bytes(5)),
    errors.GpusLost(NodeId("n")),
    errors.QuotaExceeded("t", 5, 6, 7, "bytes"),
    errors.SettingsConflict(Generation(3), Generation(4)),
    errors.RemoteBudgetSpent("cloud", "t", 5, 6, 7, "tokens", 60.0),
    errors.EgressRefused("cloud", "the disk is full"),
    errors.EgressUnsettled("cloud", "the disk is full"),
    errors.TenantCoolingDown("t", Bytes(5), Bytes(4), 60.0),
    errors.ArbiterClosing(),
    errors.ArbiterUnavailable(3.0),
    errors.TicketClosed(TicketId("t")),
    errors.TicketNotQueued(TicketId("t"), "loading"),
    errors.RequestCancelled(TicketId("t")),
    errors.TicketNotGranted(TicketId("t"), NodeId("n")),
    errors.StaleEpoch(Epoch(1), Epoch(2)),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_errors_survive_a_process_border(error: RequestError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert copy == error
    assert hash(copy) == hash(error)
    assert (str(copy), copy.__dict__) == (str(error), error.__dict__)
    assert copy.status_code in (400, 404, 409, 410, 429, 503, 507)
    assert (copy.retry_after_s is not None) == (copy.status_code in (429, 503))
    assert copy.code != RequestError.code


def test_every_request_error_is_tested_here_and_listed_in_the_tree() -> None:
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass)]
    request = {c for c in classes if issubclass(c, RequestError)} - {RequestError}
    assert {type(e) for e in ERRORS} == request
    for cls in request:
        assert f"{cls.__name__:<22}{cls.status_code}" in str(errors.__doc__)


def test_errors_of_different_kinds_or_values_differ() -> None:
    assert errors.TicketClosed(TicketId("a")) != errors.TicketClosed(TicketId("b"))
    assert errors.ArbiterClosing() != errors.TicketClosed(TicketId("a"))


def test_lost_engine_is_named_with_its_ticket_where_the_request_was_under_one() -> None:
    under = str(errors.EngineLost("small", TicketId("small-1")))
    assert under == "the engine of small (small-1) died under this request; send it again"
    assert str(errors.EngineLost("small")) == under.replace(" (small-1)", "")


@pytest.mark.parametrize(
    ("out_of_memory", "do"), [(False, "correct that"), (True, "which asks for more memory")]
)
def test_load_that_failed_is_told_with_its_cause_and_what_to_do(
    out_of_memory: bool, do: str
) -> None:
    told = str(errors.LoadFailed("small", "no such file.", out_of_memory))
    assert told.startswith("small did not load: no such file; ") and do in told
