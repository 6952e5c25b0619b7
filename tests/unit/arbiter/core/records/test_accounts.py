"""Accounts hold requests and bytes times seconds per client."""

from dataclasses import replace

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.records.accounts import Accounts, byte_seconds
from arbiter.units import GIB, Bytes, HolderId, Instant, TicketId, seconds
from tests.support.core_driver import (
    CoreDriver,
    gib,
    s,
)

pytestmark = pytest.mark.spec("C10")


def test_accounts_hold_requests_and_bytes_times_seconds() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 20, tenant="y", client="phone")
    usage = (ev.Usage(types.Client("y", "phone"), 3), ev.Usage(types.Client("w"), 1))
    held = replace(driver.held("a", t=5), client=types.Client("y", "phone"))
    driver.at(5, ev.Renewed(HolderId("h"), (held,), usage=usage))
    [w, phone] = driver.arbiter.snapshot(s(10)).clients
    assert (phone.tenant, phone.client, phone.requests_count) == ("y", "phone", 3)
    assert phone.held_bytes == gib(20) and phone.byte_seconds_count == 200 * GIB
    assert (w.tenant, w.requests_count, w.byte_seconds_count) == ("w", 1, 0)


def test_tenants_are_served_by_bytes_requested_and_not_by_count() -> None:
    driver = CoreDriver(device=20)
    driver.resident(0, "vad", 20, tenant="y")
    driver.beat(1, "vad", inflight=1)
    for name in "abcd":
        driver.ask(2, name, 20, tenant="x")
    driver.ask(3, "e", 20, tenant="y")
    assert driver.queue() == list("abecd")  # y has had as much as one of them


def test_tickets_that_were_never_granted_cost_their_tenant_no_turns() -> None:
    driver = CoreDriver(device=20)
    driver.resident(0, "vad", 20, tenant="y")
    driver.beat(1, "vad", inflight=1)
    driver.ask(2, "b", 20, tenant="x")
    for number in range(3):
        driver.ask(3 + number, f"a{number}", 20, tenant="x")
        driver.at(3.5 + number, ev.Withdrawn(TicketId(f"a{number}")))
    driver.ask(7, "c", 20, tenant="x", deadline_s=1)
    driver.fire_timer(8)
    assert driver.state_of("c") == "closed"
    driver.ask(9, "d", 20, tenant="x")
    driver.ask(9, "e", 20, tenant="y")  # which has had as much as `b` is to have
    assert driver.queue() == ["b", "d", "e"], "as if those had not asked"


def test_ticket_that_grants_to_others_have_passed_gives_its_tenant_nothing_back() -> None:
    accounts = Accounts(seconds(3600), most_count=3)
    start = accounts.virtual_start_of("x", 10.0)
    for _ in range(3):
        served = accounts.virtual_start_of("y", 10.0)
    accounts.served(served)
    assert accounts.virtual_start_of("x", 10.0) == 20
    accounts.not_served("x", start, 10.0)
    assert accounts.virtual_start_of("x", 10.0) == 30


def test_tickets_of_a_single_tenant_are_served_in_order_of_arrival() -> None:
    driver = CoreDriver(device=20)
    driver.resident(0, "vad", 20)
    driver.beat(1, "vad", inflight=1)
    for size, name in zip((20, 1, 7, 3), "abcd", strict=True):
        driver.ask(2, name, size)
    assert driver.queue() == list("abcd")


def test_clients_beyond_the_bound_become_one_row_of_their_tenant() -> None:
    accounts = Accounts(seconds(3600), most_count=3)
    driver = CoreDriver()
    for number in range(6):
        accounts.used(ev.Usage(types.Client("x", f"c{number}"), 2), Instant(number))
        accounts.settle(driver.holdings, Instant(number))
    assert len(accounts.rows) <= 4
    assert accounts.rows[types.Client("x")].requests_count >= 4
    assert sum(a.requests_count for a in accounts.rows.values()) == 12


def test_accounts_survive_a_restart() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 20, tenant="y")
    driver.fire_timer(100)
    driver.at(101, ev.Released(TicketId("a"), "idle"))
    driver.gone(102, "a")
    rows = driver.arbiter.export_accounts()
    again = CoreDriver(device=80)
    again.arbiter.restore_accounts(rows)
    assert again.arbiter.export_accounts() == rows
    assert byte_seconds(again.client_account("y").byte_ns) == Bytes(102 * 20 * GIB)
