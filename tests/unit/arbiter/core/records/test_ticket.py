"""What only means something together begins and ends together."""

import pickle

import pytest

from arbiter.core.decisions import Reason, Tier
from arbiter.core.records.ticket import Load, PendingGrowth, Ticket
from arbiter.core.types import ModelName, Need
from arbiter.units import Bytes, DeviceId, HolderId, Instant, NodeId, Span, TicketId

DEVICE = DeviceId("n/gpu:0")


def new_ticket() -> Ticket:
    return Ticket(
        TicketId("t"), HolderId("h"), NodeId("n"), "text", "a", "", Need(Bytes(10)),
        need_is_explicit=False, attempt=1, opened=Instant(0), since=Instant(0),
        home={DEVICE: Bytes(10)}, measured={DEVICE: Bytes(12)},
    )  # fmt: skip


def test_ticket_names_its_model_once() -> None:
    ticket = new_ticket()
    assert ticket.model_name == ModelName("text", "a") == ("text", "a")
    assert pickle.loads(pickle.dumps(ticket)) == ticket


def test_new_load_forgets_what_was_noted_of_the_last() -> None:
    ticket = new_ticket()
    with pytest.raises(AssertionError, match="never granted"):
        _ = ticket.last_load
    ticket.begin_load(Instant(5), Span(2))
    ticket.end_load(Span(3), Instant(4))
    ticket.note_reading(Bytes(12))
    assert ticket.last_load == Load(Instant(5), Span(2), Span(3), Instant(4), 1, Bytes(12))
    ticket.begin_load(Instant(9), Span(1))
    assert ticket.last_load == Load(Instant(9), Span(1))


def test_new_revocation_knows_nothing_of_the_sleep_before() -> None:
    ticket = new_ticket()
    ticket.begin_revocation(Reason.SWAP, Tier.ASLEEP, Instant(10))
    ticket.note_unloading(Instant(3))
    ticket.claim_sleep(Instant(4), Bytes(12))
    assert ticket.claimed_sleep is not None and ticket.claimed_sleep.from_bytes == 12
    ticket.end_revocation()
    assert ticket.leaving is None and ticket.claimed_sleep is None
    ticket.begin_revocation(Reason.IDLE, Tier.GONE, Instant(20))
    assert ticket.revocation is not None
    assert ticket.revocation.unloading_since is None and ticket.claimed_sleep is None


def test_reason_of_a_revoke_stands_when_the_ticket_is_reclaimed() -> None:
    ticket = new_ticket()
    ticket.begin_revocation(Reason.PRESSURE, Tier.GONE, Instant(10))
    ticket.note_leaving(Reason.LOST)
    assert ticket.leaving is Reason.PRESSURE


def test_growth_ends_with_all_that_it_asked_for() -> None:
    ticket = new_ticket()
    ticket.ask_growth(Bytes(5), Instant(7))
    assert ticket.growth == PendingGrowth(Bytes(5), Instant(7)) and ticket.grows_bytes == 5
    ticket.end_growth()
    assert ticket.growth is None and ticket.grows_bytes == 0
    ticket.ask_growth(Bytes(0), Instant(7))  # it wants no more
    assert ticket.growth is None


def test_what_is_given_back_counts_against_what_was_grown() -> None:
    ticket = new_ticket()
    ticket.note_shrunk(Bytes(3))  # it never grew
    assert ticket.grown is None
    ticket.note_grown(Bytes(5), shrinks_from=Instant(1))
    ticket.note_shrunk(Bytes(3))
    assert ticket.grown is not None and ticket.grown.beyond_load_bytes == 2
    ticket.note_grown(Bytes(4), shrinks_from=Instant(2))
    assert ticket.grown.beyond_load_bytes == 6 and ticket.grown.shrinks_from == 2
