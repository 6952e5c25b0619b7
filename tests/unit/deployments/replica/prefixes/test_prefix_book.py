"""Which prefixes are warmed, when, and how often after a failure: by hand-set times."""

import pytest

from deployments.replica.prefixes.prefix_book import (
    CONVERSATION_MOST_IDLE,
    FRESH,
    MOST_COUNT,
    SHORT_TERM,
    TRIES,
    UNTOUCHED,
    PrefixBook,
    WarmCause,
)
from deployments.requests.prefixes import DECLARED, Prefix

S = 1_000_000_000


def prefix(key: str, tenant: str = "default") -> Prefix:
    return Prefix(key, b"{}", tenant, DECLARED)


def warmed(book: PrefixBook) -> list[tuple[str, WarmCause]]:
    """Everything that waits, in its order, all of which succeeds."""
    found = []
    while known := book.next():
        assert known.cause is not None
        found.append((known.prefix.key, known.cause))
        book.on_warmed(known)
    return found


@pytest.mark.spec("G1")
def test_each_load_warms_what_is_declared_once_and_forgets_what_requests_brought() -> None:
    book = PrefixBook([prefix("a"), prefix("b")])
    book.on_load(0)
    book.add(prefix("r"), 5)
    assert warmed(book) == [("a", WarmCause.LOAD), ("b", WarmCause.LOAD)]
    assert book.next() is None
    book.on_load(9)
    assert not book.knows("r")
    assert warmed(book) == [("a", WarmCause.LOAD), ("b", WarmCause.LOAD)]


@pytest.mark.spec("G5")
def test_sweep_repeats_what_nothing_has_touched_for_four_fifths_of_the_short_term() -> None:
    assert UNTOUCHED == SHORT_TERM * 0.8
    book = PrefixBook([prefix("a")])
    book.on_load(0)
    warmed(book)
    for key, used_ns in (("young", S), ("old", 0)):
        book.add(prefix(key), used_ns)
    book.sweep(UNTOUCHED - 1)
    assert warmed(book) == []
    book.sweep(UNTOUCHED)
    assert sorted(warmed(book)) == [("a", WarmCause.SWEEP), ("old", WarmCause.SWEEP)]
    book.sweep(UNTOUCHED + S)
    assert warmed(book) == [("young", WarmCause.SWEEP)]


@pytest.mark.spec("G5")
def test_sweep_keeps_a_conversations_prefix_for_an_hour_and_a_declared_one_for_ever() -> None:
    book = PrefixBook([prefix("a")])
    book.on_load(0)
    book.add(prefix("r"), 0)
    book.sweep(CONVERSATION_MOST_IDLE - 1)
    assert {key for key, _ in warmed(book)} == {"a", "r"}
    book.sweep(CONVERSATION_MOST_IDLE + UNTOUCHED)
    assert {key for key, _ in warmed(book)} == {"a"}
    assert not book.knows("r")


@pytest.mark.spec("G6")
def test_failed_prefix_is_not_tried_again_until_it_is_used_or_loaded() -> None:
    book = PrefixBook([prefix("a")])

    def fail() -> None:
        known = book.next()
        assert known is not None
        book.on_failure(known)

    book.on_load(0)
    fail()
    for sweeps in range(1, 5):
        book.sweep(sweeps * UNTOUCHED)
        book.ask_untouched(WarmCause.SPEECH, FRESH, sweeps * UNTOUCHED)
        assert book.next() is None
    book.on_use("a", 5 * UNTOUCHED)
    book.sweep(6 * UNTOUCHED)
    assert book.next() is not None
    fail()
    book.on_load(7 * UNTOUCHED)
    assert warmed(book) == [("a", WarmCause.LOAD)]


@pytest.mark.spec("G6")
def test_interrupted_prefix_is_tried_a_few_times_and_then_waits_for_the_next_sweep() -> None:
    book = PrefixBook([prefix("a")])
    book.on_load(0)
    for _ in range(TRIES):
        known = book.next()
        assert known is not None
        book.on_interrupt(known)
    assert book.next() is None
    book.sweep(UNTOUCHED)
    assert warmed(book) == [("a", WarmCause.SWEEP)]


@pytest.mark.spec("G1")
def test_session_asks_for_its_tenants_prefixes_only_unless_they_are_fresh() -> None:
    book = PrefixBook([prefix("mine", "acme"), prefix("other")])
    book.on_load(0)
    warmed(book)
    book.ask_untouched(WarmCause.SESSION, FRESH, FRESH - 1, "acme")
    assert warmed(book) == []
    book.ask_untouched(WarmCause.SESSION, FRESH, FRESH, "acme")
    assert warmed(book) == [("mine", WarmCause.SESSION)]


def test_prefixes_of_requests_are_bounded_and_the_least_recently_used_go() -> None:
    book = PrefixBook([prefix("a")])
    for number in range(MOST_COUNT):
        book.add(prefix(str(number)), number)
    book.on_use("0", MOST_COUNT)
    book.add(prefix("new"), MOST_COUNT + 1)
    assert book.knows("0") and book.knows("a") and book.knows("new")
    assert not book.knows("1") and book.knows("2")


@pytest.mark.spec("G1", "L3")
def test_of_prefixes_that_are_too_large_the_last_used_are_known() -> None:
    book = PrefixBook([])
    for number in range(MOST_COUNT):
        book.add_too_large(f"k{number}", "acme")
    assert book.is_too_large("k0")
    book.add_too_large("one more", "acme")
    assert [book.is_too_large(key) for key in ("k0", "k1", "one more")] == [True, False, True]
