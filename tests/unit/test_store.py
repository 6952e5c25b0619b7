"""What outlives the arbiter, and what may be lost."""

from pathlib import Path

import pytest

from arbiter.store import Store
from arbiter.units import HolderId
from arbiter.wire import Configuration
from deployments.boot import configuration
from deployments.config import parse_table

TABLE = {"capabilities": {"c": {"role": "text", "engine": "m:f", "models": {"a": {"source": "x"}}}}}


def chosen() -> Configuration:
    return configuration(parse_table(TABLE))


@pytest.mark.spec("A18")
def test_each_start_is_a_later_epoch(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    first = store.next_epoch()
    assert store.next_epoch() == first + 1
    store.close()
    assert Store(tmp_path / "s").next_epoch() == first + 2


@pytest.mark.spec("A18")
def test_a_lost_file_still_gives_a_later_epoch(tmp_path: Path) -> None:
    first = Store(tmp_path / "s").next_epoch()
    assert Store(tmp_path / "other").next_epoch() >= first


def test_holders_learned_values_and_configuration_come_back(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    store.begin_session("one")
    store.add_holder(HolderId("h"))
    store.save_learned([{"a": 1}])
    store.save_configuration(chosen())
    store.close()
    again = Store(tmp_path / "s")
    assert again.is_of_session("one")
    assert (again.holders(), again.learned()) == ({"h"}, [{"a": 1}])
    assert again.configuration() == chosen()


def test_another_life_of_the_cluster_keeps_only_what_was_learned(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    store.begin_session("one")
    store.add_holder(HolderId("h"))
    store.save_learned([1])
    store.save_configuration(chosen())
    store.begin_session("two")
    assert not store.is_of_session("one")
    assert (store.holders(), store.learned(), store.configuration()) == (frozenset(), [1], None)


@pytest.mark.spec("L4")
def test_the_file_is_for_its_owner_only(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    store.next_epoch()
    assert {p.stat().st_mode & 0o077 for p in tmp_path.iterdir()} == {0}


@pytest.mark.parametrize("content", [b"not a database at all, but long enough" * 50, b"x" * 4096])
def test_a_broken_file_is_moved_aside_and_a_new_one_begun(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "s").write_bytes(content)
    store = Store(tmp_path / "s")
    assert store.next_epoch() > 0
    assert store.moved_aside is not None and store.moved_aside.read_bytes() == content


def test_a_configuration_of_other_code_is_forgotten(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    store._write("configuration", b"cno.such.module\nName\n.")
    assert store.configuration() is None
