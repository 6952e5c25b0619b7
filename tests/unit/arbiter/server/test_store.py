"""What outlives the arbiter, and what may be lost."""

import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arbiter.protocol.messages import Configuration
from arbiter.server import store as module
from arbiter.server.store import SESSIONS_KEPT, ExpectedHolder, Store
from arbiter.units import Generation, HolderId, NodeId
from deployments.config.boot import configuration
from deployments.config.schema import parse_table
from tests.support.local_arbiter import TABLE

ME = ExpectedHolder(HolderId("h"), NodeId("n"), pid=7, start_ticks=9)


def row(model: str, peak: int = 1) -> dict[str, Any]:
    return {"capability": "c", "model": model, "settings_key": "k", "peak_bytes": peak}


def chosen() -> Configuration:
    return configuration(parse_table(TABLE))


def other_file() -> Configuration:
    return configuration(parse_table(TABLE | {"arbiter": {"bypass_count": 3}}))


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
    store.add_member(ME)
    store.save_learned([row("a")])
    store.save_configuration(chosen())
    store.close()
    again = opened(tmp_path)
    assert (again.members(), again.learned()) == ((ME,), [row("a")])
    assert again.configuration(other_file()) == chosen()


@pytest.mark.spec("C12", "J5")
def test_next_life_of_a_cluster_goes_on_with_what_was_set_unless_its_file_has_changed(
    tmp_path: Path,
) -> None:
    file = chosen()
    changed = replace(other_file(), written=file.table, generation=Generation(4))
    store = opened(tmp_path)
    store.save_configuration(changed)
    store.end_session()
    assert opened(tmp_path).configuration(file) == changed
    assert opened(tmp_path, "two").configuration(file) == changed
    assert opened(tmp_path, "three").configuration(changed) == changed  # as an upgrade begins
    edited = replace(file, table=file.table | {"edited": True})
    assert opened(tmp_path, "four").configuration(edited) == edited.numbered(5)
    assert opened(tmp_path, "four").configuration(edited) == changed, "another epoch of that life"


@pytest.mark.spec("A2")
@pytest.mark.parametrize("ends", [True, False])
def test_registration_goes_on_in_the_next_life_of_a_cluster(tmp_path: Path, ends: bool) -> None:
    capability = chosen().capabilities.capabilities[0]
    store = opened(tmp_path)
    store.save_registered((capability,))
    if ends:
        store.end_session()
    store.close()
    for life in ("one", "two"):
        assert opened(tmp_path, life).registered() == (capability,)
    opened(tmp_path, "three").save_registered(())
    assert opened(tmp_path, "four").registered() == ()


@pytest.mark.spec("A20")
def test_table_of_an_arbiter_that_hangs_is_read_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    store.save_configuration(chosen())
    assert module.kept_table(store.path, "one") == chosen().table
    assert module.kept_table(store.path, "two") is None
    assert module.kept_table(tmp_path / "none", "one") is None
    monkeypatch.setattr(module, "protocol_hash", lambda: "other code")
    assert module.kept_table(store.path, "one") is None
    store.close()


@pytest.mark.spec("A18")
@pytest.mark.spec("E6")
def test_removed_tenants_come_back_with_their_times(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert store.removed_tenants() == {}
    store.save_removed_tenants({"acme": 12.5})
    assert opened(tmp_path).removed_tenants() == {"acme": 12.5}


def test_clusters_of_one_user_keep_apart_and_share_what_was_learned(tmp_path: Path) -> None:
    one = opened(tmp_path)
    one.add_member(ME)
    one.save_learned([row("a")])
    one.save_configuration(chosen())
    two = opened(tmp_path, "two")
    assert (two.members(), two.learned()) == ((), [row("a")])
    two.add_member(ExpectedHolder(HolderId("other"), NodeId("n")))
    two.end_session()
    assert opened(tmp_path).members() == (ME,)


@pytest.mark.spec("A17")
def test_clusters_that_learn_at_the_same_time_lose_nothing_of_each_other(tmp_path: Path) -> None:
    one, two = opened(tmp_path), opened(tmp_path, "two")
    assert one.learned() == two.learned() == []
    one.save_learned([row("a", 5), row("b", 5)])
    two.save_learned([row("c", 7)])
    two.save_learned([row("b", 9)])
    one.save_learned([row("a", 6)])  # has not heard of what the other knows of b
    assert sorted(opened(tmp_path).learned(), key=str) == [row("a", 6), row("b", 9), row("c", 7)]
    one.save_learned([], [("c", "a", "k")])
    assert sorted(opened(tmp_path).learned(), key=str) == [row("b", 9), row("c", 7)]


@pytest.mark.spec("A17")
def test_learned_row_that_could_not_be_written_is_written_with_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOCKED_S", 0.01)
    store, other = opened(tmp_path), sqlite3.connect(tmp_path / "s", isolation_level=None)
    gone = [("c", "gone", "k")]
    assert store.save_learned([row("a"), row("gone")])
    other.execute("BEGIN EXCLUSIVE")
    assert not store.save_learned([row("b")], gone)
    assert not store.save_learned([], gone)
    assert store.trouble is not None and "locked" in store.trouble
    other.execute("COMMIT")
    other.close()
    assert store.save_learned([row("b")], gone)
    assert opened(tmp_path).learned() == [row("a"), row("b")]


def test_ended_session_has_no_members_but_later_epochs(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.add_member(ME)
    store.save_configuration(chosen())
    before = store.next_epoch()
    store.end_session()
    again = opened(tmp_path)
    assert again.members() == ()
    assert again.next_epoch() > before


def test_only_the_newest_sessions_are_remembered(tmp_path: Path) -> None:
    opened(tmp_path, "first").add_member(ME)
    for number in range(SESSIONS_KEPT):
        opened(tmp_path, f"s{number}").close()
    assert opened(tmp_path, "first").members() == ()


@pytest.mark.spec("L4")
def test_state_file_is_for_its_owner_only(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.next_epoch()
    assert {p.stat().st_mode & 0o077 for p in tmp_path.iterdir()} == {0}


@pytest.mark.spec("L4")
def test_a_file_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    opened(tmp_path).close()
    (tmp_path / "s").chmod(0o644)
    opened(tmp_path).close()
    assert (tmp_path / "s").stat().st_mode & 0o077 == 0


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
    assert store.configuration(other_file()) == other_file().numbered(1)


@pytest.mark.spec("A18")
def test_failed_state_write_is_reported_once_and_stops_nothing(tmp_path: Path) -> None:
    told: list[str] = []
    store = opened(tmp_path)
    store.on_trouble = told.append
    first = store.next_epoch()
    with sqlite3.connect(tmp_path / "s", isolation_level=None) as other:
        other.execute("DROP TABLE session_members")
        other.execute("DROP TABLE session_facts")
    other.close()
    store.add_member(ME)
    assert store.next_epoch() >= first
    assert len(told) == 1 and "session_members" in told[0]


@pytest.mark.spec("A18")
def test_arbiter_goes_on_without_a_state_file_where_none_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = Store(tmp_path / "file" / "s", "one")
    store.add_member(ME)
    assert (store.members(), store.next_epoch() > 0) == ((ME,), True)
    assert store.trouble is not None and "file" in store.trouble
