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
    entry = new_ticket()
    assert entry.model_name == ModelName("text", "a") == ("text", "a")
    assert pickle.loads(pickle.dumps(entry)) == entry


def test_new_load_forgets_what_was_noted_of_the_last() -> None:
    entry = new_ticket()
    with pytest.raises(AssertionError, match="never granted"):
        _ = entry.last_load
    entry.begin_load(Instant(5), Span(2))
    entry.end_load(Span(3), Instant(4))
    entry.note_reading(Bytes(12))
    assert entry.last_load == Load(Instant(5), Span(2), Span(3), Instant(4), 1, Bytes(12))
    entry.begin_load(Instant(9), Span(1))
    assert entry.last_load == Load(Instant(9), Span(1))


def test_new_revocation_knows_nothing_of_the_sleep_before() -> None:
    entry = new_ticket()
    entry.begin_revocation(Reason.SWAP, Tier.ASLEEP, Instant(10))
    entry.note_unloading(Instant(3))
    entry.claim_sleep(Instant(4), Bytes(12))
    assert entry.claimed_sleep is not None and entry.claimed_sleep.from_bytes == 12
    entry.end_revocation()
    assert entry.leaving is None and entry.claimed_sleep is None
    entry.begin_revocation(Reason.IDLE, Tier.GONE, Instant(20))
    assert entry.revocation is not None
    assert entry.revocation.unloading_since is None and entry.claimed_sleep is None


def test_reason_of_a_revoke_stands_when_the_ticket_is_reclaimed() -> None:
    entry = new_ticket()
    entry.begin_revocation(Reason.PRESSURE, Tier.GONE, Instant(10))
    entry.note_leaving(Reason.LOST)
    assert entry.leaving is Reason.PRESSURE


def test_growth_ends_with_all_that_it_asked_for() -> None:
    entry = new_ticket()
    entry.ask_growth(Bytes(5), Instant(7))
    assert entry.growth == PendingGrowth(Bytes(5), Instant(7)) and entry.grows_bytes == 5
    entry.end_growth()
    assert entry.growth is None and entry.grows_bytes == 0
    entry.ask_growth(Bytes(0), Instant(7))  # it wants no more
    assert entry.growth is None


def test_what_is_given_back_counts_against_what_was_grown() -> None:
    entry = new_ticket()
    entry.note_shrunk(Bytes(3))  # it never grew
    assert entry.grown is None
    entry.note_grown(Bytes(5), shrinks_from=Instant(1))
    entry.note_shrunk(Bytes(3))
    assert entry.grown is not None and entry.grown.beyond_load_bytes == 2
    entry.note_grown(Bytes(4), shrinks_from=Instant(2))
    assert entry.grown.beyond_load_bytes == 6 and entry.grown.shrinks_from == 2
