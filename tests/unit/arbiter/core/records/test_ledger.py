"""The ledger: lawful moves, books that add up, indexes that the audit checks."""

from collections.abc import Callable

import pytest

from arbiter.core import events as ev
from arbiter.core.records.ledger import DeviceAccount, Ledger, audit
from arbiter.core.records.ticket import TRANSITIONS, State, Ticket
from arbiter.core.types import DeviceKind, LeaseConditions, ModelName, Need, Priority
from arbiter.errors import LedgerBroken
from arbiter.units import (
    Bytes,
    DeviceId,
    HolderId,
    Instant,
    Span,
    TicketId,
)
from tests.support.core_driver import CPU, HOST, NODE, CoreDriver


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


def kept() -> Ledger:
    """The books of a node whose device is overcommitted, with a lease and two models' tickets."""
    ledger = Ledger()
    for device, kind in ((CPU, DeviceKind.CPU), (HOST, DeviceKind.HOST)):
        ledger.put_device(DeviceAccount(device, NODE, kind, Bytes(9), Bytes(9), Bytes(9)))
    for name, state in (("a", State.RESIDENT), ("b", State.DRAINING), ("c", State.QUEUED)):
        ticket = Ticket(
            TicketId(name), HolderId("h"), NODE, "text", name, "", Need(Bytes(5)), True, 1,
            Instant(0), Instant(0), state, pinned=name == "a",
        )  # fmt: skip
        if name == "b":
            terms = LeaseConditions("t", Span(1), Span(1), preemptible=False)
            ticket.bind_lease(terms, Instant(1), Priority.NORMAL, 0)
        if state is not State.QUEUED:
            ticket.granted = {CPU: Bytes(5)}
        ledger.open(ticket)
    return ledger


@pytest.mark.parametrize("broken", [
    lambda ledger: ledger.books[CPU].tickets.pop(TicketId("a")),
    lambda ledger: ledger.books[CPU].leaving.pop(TicketId("b")),
    lambda ledger: ledger.books[CPU].loading.update(ledger.books[CPU].leaving),
    lambda ledger: ledger.books[CPU].copies.update([ModelName("text", "a")]),
    lambda ledger: setattr(ledger.books[CPU], "pinned_bytes", Bytes(0)),
    lambda ledger: ledger.books[CPU].held.clear(),
    lambda ledger: ledger.books[HOST].held.update(x=1),
    lambda ledger: ledger.holdings.by_client.clear(),
    lambda ledger: ledger.holdings.by_tenant.update(x=1),
    lambda ledger: ledger.holdings.tickets["default"].pop(TicketId("a")),
    lambda ledger: setattr(ledger, "lent_bytes", Bytes(18)),
    lambda ledger: ledger._short.clear(),
    lambda ledger: ledger.open_count.update(text=1),
    lambda ledger: ledger._held[HolderId("h")].pop(TicketId("c")),
    lambda ledger: ledger._holding.update(x={}),
    lambda ledger: ledger._leases.clear(),
    lambda ledger: ledger._of_model.pop(ModelName("text", "c")),
    lambda ledger: setattr(ledger.find(TicketId("c")), "state", State.CLOSED),
])  # fmt: skip
def test_audit_finds_each_index_that_is_not_as_the_tickets_say(
    broken: Callable[[Ledger], object],
) -> None:
    ledger = kept()
    audit(ledger)
    broken(ledger)
    with pytest.raises(LedgerBroken):
        audit(ledger)


def test_tenant_that_holds_nothing_any_more_is_in_no_index() -> None:
    driver = CoreDriver()
    driver.resident(0, "a", 1, tenant="gone")
    driver.at(1, ev.Released(TicketId("a"), "x"))
    driver.gone(1, "a")
    assert "gone" not in driver.holdings.tickets


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
