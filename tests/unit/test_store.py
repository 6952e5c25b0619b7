"""What outlives the arbiter, and what may be lost."""

import sqlite3
from pathlib import Path

import pytest

from arbiter import store as module
from arbiter.store import SESSIONS_KEPT, Store
from arbiter.units import HolderId
from arbiter.wire import Configuration
from deployments.boot import configuration
from deployments.config import parse_table

TABLE = {"capabilities": {"c": {"role": "text", "engine": "m:f", "models": {"a": {"source": "x"}}}}}
H = HolderId("h")


def chosen() -> Configuration:
    return configuration(parse_table(TABLE))


def opened(folder: Path, session: str = "one") -> Store:
    return Store(folder / "s", session)


@pytest.mark.spec("A18")
def test_each_start_is_a_later_epoch(tmp_path: Path) -> None:
    store = opened(tmp_path)
    first = store.next_epoch()
    second = store.next_epoch()
    store.close()
    assert first < second < opened(tmp_path).next_epoch()


@pytest.mark.spec("A18")
def test_a_lost_file_still_gives_a_later_epoch(tmp_path: Path) -> None:
    first = Store(tmp_path / "s", "one").next_epoch()
    assert Store(tmp_path / "other", "one").next_epoch() >= first


def test_holders_learned_values_and_configuration_come_back(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.add_holder(H)
    store.save_learned([{"a": 1}])
    store.save_configuration(chosen())
    store.close()
    again = opened(tmp_path)
    assert (again.holders(), again.learned()) == ({H}, [{"a": 1}])
    assert again.configuration() == chosen()


@pytest.mark.spec("A18")
def test_clusters_of_one_user_keep_apart_and_share_what_was_learned(tmp_path: Path) -> None:
    one = opened(tmp_path)
    one.add_holder(H)
    one.save_learned([1])
    one.save_configuration(chosen())
    two = opened(tmp_path, "two")
    assert (two.holders(), two.learned(), two.configuration()) == (frozenset(), [1], None)
    two.add_holder(HolderId("other"))
    two.end_session()
    again = opened(tmp_path)
    assert (again.holders(), again.configuration()) == ({H}, chosen())


def test_after_its_end_a_session_expects_nobody_but_counts_on(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.add_holder(H)
    store.save_configuration(chosen())
    before = store.next_epoch()
    store.end_session()
    again = opened(tmp_path)
    assert (again.holders(), again.configuration()) == (frozenset(), None)
    assert again.next_epoch() > before


def test_only_the_newest_sessions_are_remembered(tmp_path: Path) -> None:
    opened(tmp_path, "first").add_holder(H)
    for number in range(SESSIONS_KEPT):
        opened(tmp_path, f"s{number}").close()
    assert opened(tmp_path, "first").holders() == frozenset()


@pytest.mark.spec("L4")
def test_the_file_is_for_its_owner_only(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.next_epoch()
    assert {p.stat().st_mode & 0o077 for p in tmp_path.iterdir()} == {0}


@pytest.mark.parametrize("content", [b"not a database at all, but long enough" * 50, b"x" * 4096])
def test_a_broken_file_is_moved_aside_and_a_new_one_begun(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "s").write_bytes(content)
    store = opened(tmp_path)
    assert store.next_epoch() > 0
    assert store.moved_aside is not None and store.moved_aside.read_bytes() == content


def test_a_configuration_of_other_code_is_dropped_though_it_could_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    store.save_configuration(chosen())
    monkeypatch.setattr(module, "protocol_hash", lambda: "other")
    assert store.configuration() is None


@pytest.mark.spec("A18")
def test_a_write_that_fails_costs_comfort_and_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    store = opened(tmp_path)
    store.on_trouble = told.append
    first = store.next_epoch()
    with sqlite3.connect(tmp_path / "s", isolation_level=None) as other:
        other.execute("DROP TABLE session_holders")
        other.execute("DROP TABLE session_facts")
    other.close()
    store.add_holder(H)
    assert store.next_epoch() >= first
    assert len(told) == 1 and "session_holders" in told[0]


@pytest.mark.spec("A18")
def test_where_no_file_can_be_made_the_arbiter_goes_on_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = Store(tmp_path / "file" / "s", "one")
    store.add_holder(H)
    assert (store.holders(), store.next_epoch() > 0) == ({H}, True)
    assert store.trouble is not None and "file" in store.trouble
