"""The ledger: lawful moves, books that add up, indexes that the audit checks."""

import pytest

from arbiter.core import events as ev
from arbiter.core.records.ticket import TRANSITIONS, State, Ticket
from arbiter.errors import LedgerBroken
from arbiter.units import (
    Bytes,
    DeviceId,
    Instant,
    TicketId,
)
from tests.support.core_driver import CPU, CoreDriver


def test_an_illegal_move_is_a_bug() -> None:
    driver = CoreDriver()
    driver.ask(0, "a", 1)
    ticket = driver.ticket("a")
    with pytest.raises(LedgerBroken, match="loading -> queued"):
        driver.move(ticket, State.QUEUED, Instant(0))


def test_every_state_can_be_left_towards_closed() -> None:
    reaches = {State.CLOSED}
    for _ in State:
        reaches |= {s for s, to in TRANSITIONS.items() if to & reaches}
    assert reaches == set(State)


@pytest.mark.parametrize("field", ["charged_bytes", "free_bytes", "foreign_bytes"])
def test_books_that_do_not_add_up_crash_the_next_event_that_touches_them(field: str) -> None:
    driver = CoreDriver()
    driver.ask(0, "a", 1)
    book = driver.account()
    setattr(book, field, getattr(book, field) + 1)
    with pytest.raises(LedgerBroken):
        driver.ask(1, "b", 1)


def test_untouched_books_are_checked_on_the_timer() -> None:
    driver = CoreDriver()
    driver.account().free_bytes += 1
    driver.fire_timer(9.9)
    with pytest.raises(LedgerBroken):
        driver.fire_timer(10)


def test_tickets_of_a_model_are_found_until_they_are_closed() -> None:
    driver = CoreDriver(device=10)
    for name in ("a1", "b1", "a2"):
        driver.ask(0, name, 10)
    assert driver.tickets_of_model("a") == ["a1", "a2"]
    driver.at(1, ev.Withdrawn(TicketId("a2")))
    assert driver.tickets_of_model("a") == ["a1"]
    driver.audit()


def test_an_index_that_lost_a_ticket_is_found_by_the_audit() -> None:
    driver = CoreDriver()
    driver.ask(0, "a", 1)
    ticket = driver.account().tickets.pop(TicketId("a"))
    book = driver.account()
    book.charged_bytes -= ticket.charge(CPU)
    book.free_bytes += ticket.charge(CPU)
    with pytest.raises(LedgerBroken, match="index"):
        driver.audit()


@pytest.mark.spec("N2")
def test_audit_weighs_a_ticket_as_often_among_many_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = CoreDriver()
    driver.resident(0, "a", 1)
    weighed: list[TicketId] = []
    charge = Ticket.charge

    def count(ticket: Ticket, device: DeviceId) -> Bytes:
        weighed.append(ticket.id)
        return charge(ticket, device)

    monkeypatch.setattr(Ticket, "charge", count)
    driver.audit()
    alone = len(weighed)
    for number in range(50):
        driver.see_node(1, 80, 0, f"other{number}")
    weighed.clear()
    driver.audit()
    assert len(weighed) == alone
