"""The parts on their own: ledger, budget, timers, line, estimates, errors."""

import inspect
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbiter import errors
from arbiter.core import events as ev
from arbiter.core.records.estimates import Estimates, ModelKey
from arbiter.core.records.ledger import audit as audit_books
from arbiter.core.records.request_queue import RequestQueue
from arbiter.core.records.ticket import TRANSITIONS, State
from arbiter.core.records.timers import Timers
from arbiter.core.settings import DEFAULTS, Arenas, Settings
from arbiter.core.tickets import budget
from arbiter.core.types import DeviceKind, Need
from arbiter.errors import LedgerBroken, RequestError
from arbiter.units import (
    GIB,
    MIB,
    Bytes,
    Epoch,
    Generation,
    HolderId,
    Instant,
    NodeId,
    Span,
    TicketId,
    human,
    in_seconds,
    seconds,
)
from policies import admit_fifo
from tests.support.core_driver import CPU, CoreDriver

# -- ledger ---------------------------------------------------------------------------------------


def test_an_illegal_move_is_a_bug() -> None:
    driver = CoreDriver()
    driver.ask(0, "a", 1)
    entry = driver.state.ledger.find(TicketId("a"))
    with pytest.raises(LedgerBroken, match="loading -> queued"):
        driver.state.ledger.move(entry, State.QUEUED, Instant(0))


def test_every_state_can_be_left_towards_closed() -> None:
    reaches = {State.CLOSED}
    for _ in State:
        reaches |= {s for s, to in TRANSITIONS.items() if to & reaches}
    assert reaches == set(State)


@pytest.mark.parametrize("field", ["charged_bytes", "free_bytes", "foreign_bytes"])
def test_books_that_do_not_add_up_crash_the_next_event_that_touches_them(field: str) -> None:
    driver = CoreDriver()
    driver.ask(0, "a", 1)
    book = driver.state.ledger.books[CPU]
    setattr(book, field, getattr(book, field) + 1)
    with pytest.raises(LedgerBroken):
        driver.ask(1, "b", 1)


def test_untouched_books_are_checked_on_the_timer() -> None:
    driver = CoreDriver()
    driver.state.ledger.books[CPU].free_bytes += 1
    driver.woke(9.9)
    with pytest.raises(LedgerBroken):
        driver.woke(10)


def test_an_index_that_lost_a_ticket_is_found_by_the_audit() -> None:
    driver = CoreDriver()
    driver.ask(0, "a", 1)
    entry = driver.state.ledger.books[CPU].entries.pop(TicketId("a"))
    book = driver.state.ledger.books[CPU]
    book.charged_bytes -= entry.charge(CPU)
    book.free_bytes += entry.charge(CPU)
    with pytest.raises(LedgerBroken, match="index"):
        audit_books(driver.state.ledger)


# -- budget (B2, B3) -------------------------------------------------------------------------


@pytest.mark.spec("B2", "B3")
def test_lendable_takes_arena_then_wiggle_then_on_gpus_the_margin() -> None:
    total = Bytes(80 * GIB)
    arena = int(total * 0.9)
    assert budget.lendable(total, DeviceKind.CPU, DEFAULTS) == arena - int(arena * 0.1)
    gpu = budget.lendable(total, DeviceKind.GPU, DEFAULTS)
    assert gpu == arena - int(arena * 0.1) - 512 * MIB


@pytest.mark.spec("B2")
def test_a_cap_lowers_the_arena_and_never_raises_it() -> None:
    capped = replace(DEFAULTS, arenas=Arenas(gpu_bytes=Bytes(1000), cpu_bytes=Bytes(500)))
    assert budget.arena(Bytes(2000), DeviceKind.GPU, capped) == 1000
    assert budget.arena(Bytes(1000), DeviceKind.GPU, capped) == 900
    assert budget.arena(Bytes(1000), DeviceKind.CPU, capped) == 500
    assert budget.arena(Bytes(1000), DeviceKind.HOST, capped) == 900


def test_a_tiny_device_lends_nothing_rather_than_less_than_nothing() -> None:
    assert budget.lendable(Bytes(100 * MIB), DeviceKind.GPU, DEFAULTS) == 0


@pytest.mark.spec("B2")
def test_pinned_bytes_are_not_lent_on_demand() -> None:
    assert budget.on_demand(Bytes(800), Bytes(300)) == 500
    assert budget.on_demand(Bytes(800), Bytes(900)) == 0
    assert budget.pinned_overcommit(Bytes(800), Bytes(900)) == 100
    assert budget.pinned_overcommit(Bytes(800), Bytes(300)) == 0


@pytest.mark.spec("A16")
@given(foreign=st.integers(0, 2000), cap=st.integers(0, 2000))
def test_foreign_bytes_count_once_they_exceed_what_a_cap_leaves_to_others(
    foreign: int, cap: int
) -> None:
    settings = replace(DEFAULTS, arenas=Arenas(cpu_bytes=Bytes(cap)))
    eats = budget.foreign_in_budget(Bytes(foreign), Bytes(1000), DeviceKind.CPU, settings)
    assert eats == max(0, foreign - max(0, 900 - cap))


# -- timers ---------------------------------------------------------------------------------------


def test_timers_are_due_once_in_order_and_never_late() -> None:
    timers = Timers()
    timers.set(("ticket", "b"), Instant(5))
    timers.set(("ticket", "a"), Instant(7))
    timers.set(("ticket", "a"), Instant(3))  # earlier wins
    timers.set(("ticket", "b"), Instant(9))  # later is looked at when the first rings
    assert timers.next() == 3
    assert timers.due(Instant(2)) == []
    assert timers.due(Instant(6)) == [("ticket", "a"), ("ticket", "b")]
    assert timers.next() is None
    assert timers.due(Instant(100)) == []


# -- line -----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=30))
def test_queue_keeps_the_order_of_the_policy_whatever_leaves(steps: list[tuple[int, bool]]) -> None:
    line, model, now = RequestQueue(admit_fifo.key), [], 0
    for number, leaves in steps:
        now += number
        if leaves and model:
            line.drop(model.pop(number % len(model)))
        else:
            ticket = TicketId(f"t{len(model)}-{now}-{number}-{line._sequence}")
            line.add(ticket, "m", NodeId("n"), Instant(now))
            model.append(ticket)
        assert line.tickets() == model
        assert line.count("m") == len(line) == len(model)


def test_queue_walk_meets_tickets_queued_at_its_start_that_have_not_left() -> None:
    line, node = RequestQueue(admit_fifo.key), NodeId("n")
    for number, ticket in enumerate("abcd"):
        line.add(TicketId(ticket), "m", node, Instant(number))
    walk = line.walk(node)
    met = [next(walk).request.ticket]
    line.drop(TicketId("c"))
    line.add(TicketId("e"), "m", node, Instant(9))
    for waiting in walk:  # one moves ahead of who walks
        line.age(waiting)
        met.append(waiting.request.ticket)
        assert [w.request.ticket for w in line.walk(node)][-1] == "e"
    assert met == ["a", "b", "d"]
    assert [w.request.ticket for w in line.at(node)] == ["b", "d", "a", "e"]


# -- estimates (A17) -------------------------------------------------------------------------

KEY = ModelKey("text", "a", "")


@pytest.mark.spec("A17")
def test_learned_values_survive_as_plain_rows() -> None:
    estimates = Estimates(DEFAULTS)
    estimates.saw_peak(KEY, Bytes(1000))
    estimates.loaded(KEY, seconds(3))
    estimates.woke(KEY, seconds(1))
    again = Estimates(DEFAULTS)
    again.restore(estimates.export())
    assert again.export() == estimates.export()
    assert again.export()[0] == {
        "version": 1, "capability": "text", "model": "a", "settings_key": "", "peak_bytes": 1000,
        "corrected_bytes": 0, "loads_ns": [seconds(3)], "wakes_ns": [seconds(1)],
    }  # fmt: skip
    assert again.size(KEY, Need(Bytes(10)), False).device_bytes == 1050
    again.did_not_sleep(KEY)
    assert not again.can_sleep(KEY)
    again.forget(KEY)
    assert again.can_sleep(KEY)
    assert [row["model"] for row in again.export()] == [""]  # what holds for the capability


@pytest.mark.spec("A17")
def test_a_lower_reading_does_not_lower_a_peak_and_other_settings_learn_apart() -> None:
    estimates = Estimates(DEFAULTS)
    estimates.saw_peak(KEY, Bytes(1000))
    estimates.saw_peak(KEY, Bytes(500))
    assert estimates.size(KEY, Need(Bytes(10)), False).source == "learned"
    assert estimates.size(KEY, Need(Bytes(10)), False).device_bytes == 1050
    other = ModelKey("text", "a", "fp8")
    assert estimates.size(other, Need(Bytes(10)), False).source == "computed"


@pytest.mark.spec("A12")
def test_a_correction_lasts_until_a_load_succeeds() -> None:
    estimates = Estimates(DEFAULTS)
    estimates.ran_out(KEY, Bytes(1000))
    assert estimates.size(KEY, Need(Bytes(10)), True).device_bytes == 1250
    estimates.loaded(KEY, seconds(1))
    assert estimates.size(KEY, Need(Bytes(10)), True).device_bytes == 10


def test_an_arbiter_hands_its_learning_to_the_next() -> None:
    driver, successor = CoreDriver(), CoreDriver()
    driver.ask(0, "a", 1)
    driver.at(3, ev.Loaded(TicketId("a"), seconds(3)))
    successor.arbiter.restore_learned(driver.arbiter.export_learned())
    assert successor.arbiter.export_learned() == driver.arbiter.export_learned()


# -- errors ---------------------------------------------------------------------------------------

ERRORS = [
    errors.UnknownCapability("x", ("a",)),
    errors.UnknownModel("x", "text", ("a", "b")),
    errors.UnknownRole("poet", "odes", ("text",)),
    errors.UnknownTicket(TicketId("t")),
    errors.CapabilityConflict("text", "role"),
    errors.NeverFits(TicketId("a"), Bytes(90 * GIB), Bytes(80 * GIB)),
    errors.DeadlineUnmet(TicketId("a"), 5.0, 2.0),
    errors.QueueFull("a", 3, 3, 1.0),
    errors.ModelCoolingDown("a", "bad weights", 2.0),
    errors.LoadFailed("a", "bad weights", False),
    errors.EngineLost("a", TicketId("t")),
    errors.CapabilityFailed("a", "it has no application"),
    errors.HolderQuarantined(HolderId("h"), Bytes(5)),
    errors.LeaseRefused("pid", "1 is no process"),
    errors.UnknownLease("job"),
    errors.GrowthRefused(TicketId("a"), Bytes(5), "it is leaving"),
    errors.NotResident("a", "text", "cold"),
    errors.UnderPressure(NodeId("n"), Bytes(5)),
    errors.QuotaExceeded("t", 5, 6, 7, "bytes"),
    errors.SettingsConflict(Generation(3), Generation(4)),
    errors.TenantCoolingDown("t", Bytes(5), Bytes(4), 60.0),
    errors.ArbiterClosing(),
    errors.ArbiterUnavailable(3.0),
    errors.TicketClosed(TicketId("t")),
    errors.TicketNotGranted(TicketId("t"), NodeId("n")),
    errors.StaleEpoch(Epoch(1), Epoch(2)),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_errors_survive_a_process_border(error: RequestError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert copy == error
    assert hash(copy) == hash(error)
    assert (str(copy), copy.__dict__) == (str(error), error.__dict__)
    assert copy.status_code in (400, 404, 409, 429, 503, 507)
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


# -- units, settings ------------------------------------------------------------------------------


def test_units_are_whole() -> None:
    assert seconds(1.5) == 1_500_000_000
    assert in_seconds(Span(250_000_000)) == 0.25
    assert (human(Bytes(GIB)), human(Bytes(-GIB)), human(Bytes(MIB))) == (
        "1.0 GiB", "-1.0 GiB", "1.0 MiB",
    )  # fmt: skip


def test_settings_pickle_and_compare() -> None:
    assert pickle.loads(pickle.dumps(DEFAULTS)) == Settings()
