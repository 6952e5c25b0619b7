"""EgressBook over a real state file: budgets across restarts, and a line for each egress."""

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from arbiter.core.decisions import EventKind, LogEvent
from arbiter.errors import EgressRefused, EgressUnsettled, RemoteBudgetSpent
from arbiter.protocol.messages import DaySpent, Egress, EgressEnd
from arbiter.server.egress import EgressBook
from arbiter.server.store import Store
from arbiter.units import Bytes, seconds

NOON = 1_780_056_000.0  # 2026-05-29 12:00 UTC
FIRST = Egress("e1", "cloud", "far-chat", "ann", Bytes(50), 60, 600, 100, 1_000)


class Arbiter:
    """The book of one life of the arbiter, and what it told."""

    def __init__(self, path: Path, unix_s: float = NOON, session: str = "s") -> None:
        self.store, self.told, self.unix_s = Store(path, session), list[LogEvent](), unix_s
        self.book = EgressBook(self.store, self.told.append, lambda: self.unix_s)


def end(egress: Egress, outcome: str = "answered", prompt: int = 10, answer: int = 20) -> EgressEnd:
    return EgressEnd(egress, outcome, Bytes(70), prompt, answer, 300, seconds(1.5))


def of_ann(*counts: int) -> dict[str, object]:
    """Tokens and money that she has spent, and those that are reserved."""
    names = ("tokens", "money_micros", "reserved_tokens", "reserved_money_micros")
    return {"tenant": "ann", "remote": "cloud", **dict(zip(names, counts, strict=True))}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "arbiter.sqlite"


@pytest.mark.spec("J5")
def test_what_may_be_spent_is_reserved_and_what_was_spent_takes_its_place(path: Path) -> None:
    now = Arbiter(path)
    assert now.book.reserve(FIRST) == DaySpent(60, 600)
    with pytest.raises(RemoteBudgetSpent, match="60 tokens at cloud today"):
        now.book.reserve(replace(FIRST, id="e2"))
    assert now.book.settle(end(FIRST)) == DaySpent(30, 300)
    assert now.book.reserve(replace(FIRST, id="e3")) == DaySpent(90, 900)
    assert now.book.today() == [of_ann(30, 300, 60, 600)]


@pytest.mark.spec("J5")
def test_each_message_counts_once_however_often_it_comes(path: Path) -> None:
    now = Arbiter(path)
    assert now.book.reserve(FIRST) == now.book.reserve(FIRST)
    assert now.book.settle(end(FIRST)) == now.book.settle(end(FIRST)) == DaySpent(30, 300)
    assert [line.kind for line in now.told] == [EventKind.REMOTE_EGRESS, EventKind.REMOTE_ANSWER]


@pytest.mark.spec("J5")
@pytest.mark.parametrize("write", ["INSERT ON remote_spent", "DELETE ON remote_reserved"])
def test_what_could_not_be_settled_stays_reserved(path: Path, write: str) -> None:
    now = Arbiter(path)
    now.book.reserve(FIRST)
    with sqlite3.connect(path) as other:
        other.execute(f"CREATE TRIGGER full BEFORE {write} BEGIN SELECT RAISE(ABORT, 'full'); END")
    with pytest.raises(EgressUnsettled, match=r"its highest price stays reserved: .*full"):
        now.book.settle(end(FIRST))
    assert now.store.spent("2026-05-29", "ann", "cloud") == (60, 600)
    with sqlite3.connect(path) as other:
        other.execute("DROP TRIGGER full")
    for _ in range(2):
        assert now.book.settle(end(FIRST)) == DaySpent(30, 300)
    kinds = [line.kind for line in now.told]
    assert kinds == [EventKind.REMOTE_EGRESS, EventKind.REMOTE_ANSWER]
    now.store.close()


@pytest.mark.spec("J5")
def test_an_end_that_cannot_be_looked_up_is_to_be_told_again(path: Path) -> None:
    now = Arbiter(path)
    now.book.reserve(FIRST)
    with sqlite3.connect(path) as other:
        other.execute("ALTER TABLE remote_reserved RENAME TO away")
    with pytest.raises(EgressUnsettled):
        now.book.settle(end(FIRST))
    with sqlite3.connect(path) as other:
        other.execute("ALTER TABLE away RENAME TO remote_reserved")
    assert now.book.settle(end(FIRST)) == DaySpent(30, 300)


@pytest.mark.spec("J5")
def test_an_end_without_a_reservation_costs_nothing_and_is_no_line(path: Path) -> None:
    now = Arbiter(path)
    assert now.book.settle(end(FIRST)) == DaySpent(0, 0)
    assert now.told == []


@pytest.mark.spec("J5")
def test_a_settlement_that_cannot_begin_changes_nothing(path: Path) -> None:
    now = Arbiter(path)
    now.book.reserve(FIRST)
    now.store._db.execute("BEGIN")  # so that a second cannot begin
    assert not now.store.settle(FIRST.id, 30, 300)
    now.store._db.execute("ROLLBACK")
    assert now.store.is_reserved(FIRST.id)


@pytest.mark.spec("J5")
def test_a_restart_forgets_nothing_and_a_lost_end_stays_reserved(path: Path) -> None:
    before = Arbiter(path)
    before.book.reserve(FIRST)
    before.book.settle(end(FIRST))
    before.book.reserve(replace(FIRST, id="e2"))
    before.store.close()
    after = Arbiter(path, session="another")
    with pytest.raises(RemoteBudgetSpent) as refused:
        after.book.reserve(replace(FIRST, id="e3"))
    assert (refused.value.has, refused.value.retry_after_s) == (90, 12 * 3_600)
    assert after.book.today() == [of_ann(30, 300, 60, 600)]


@pytest.mark.spec("J5")
def test_a_budget_is_of_one_tenant_one_remote_and_one_day(path: Path) -> None:
    now = Arbiter(path)
    now.book.reserve(FIRST)
    now.book.reserve(replace(FIRST, id="e2", tenant="bob"))
    now.book.reserve(replace(FIRST, id="e3", remote="other"))
    now.unix_s += 86_400
    assert now.book.reserve(replace(FIRST, id="e4")) == DaySpent(60, 600)
    now.book.settle(end(FIRST))  # of yesterday, to which it is counted
    assert now.book.today() == [of_ann(0, 0, 60, 600)]


@pytest.mark.spec("J5")
def test_an_egress_is_a_line_with_sizes_and_prices_and_no_prompt(path: Path) -> None:
    now = Arbiter(path)
    now.book.reserve(FIRST)
    now.book.settle(end(FIRST, "timeout"))
    left, answered = now.told
    about = {"egress": "e1", "remote": "cloud", "model": "far-chat", "tenant": "ann"}
    about |= {"tokens_at_most": 60, "money_at_most": 0.0006}
    assert (left.data, left.size_bytes) == (about, 50)
    told = {"outcome": "timeout", "prompt_tokens": 10, "answer_tokens": 20}
    assert answered.data == about | told | {"sent_bytes": 50, "money": 0.0003}
    assert (answered.size_bytes, answered.took) == (70, seconds(1.5))


@pytest.mark.spec("J5")
def test_nothing_leaves_where_it_cannot_be_written_down(path: Path) -> None:
    path.mkdir()
    now = Arbiter(path)
    with pytest.raises(EgressRefused, match=r"nothing was sent to cloud"):
        now.book.reserve(FIRST)
    assert now.told == []


def test_a_budget_of_nothing_allows_nothing_and_none_allows_all(path: Path) -> None:
    now = Arbiter(path)
    with pytest.raises(RemoteBudgetSpent, match="money"):
        now.book.reserve(replace(FIRST, most_money_micros=0))
    unbound = replace(FIRST, tokens_count=10**9, most_tokens_count=None, most_money_micros=None)
    assert now.book.reserve(unbound).tokens_count == 10**9
