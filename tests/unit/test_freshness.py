"""Whether a model's files are those it was loaded from."""

import os
from itertools import pairwise
from pathlib import Path

import pytest

from arbiter.events import Need
from arbiter.units import Bytes, TicketId
from deployments import freshness
from deployments.freshness import WHOLE_BYTES, contents, files, pieces
from deployments.plan import ModelPlan
from deployments.slot import Slot

pytestmark = pytest.mark.spec("D5")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "deep" / "model.safetensors").write_bytes(b"12345678")
    return tmp_path


def test_the_same_files_are_the_same(model: Path) -> None:
    assert files(str(model)) == files(str(model)) and len(files(str(model))) == 2


def test_a_file_rewritten_in_place_with_its_old_time_and_size_is_noticed(model: Path) -> None:
    file, before = model / "deep" / "model.safetensors", files(str(model))
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_bytes(b"87654321")
    os.utime(file, ns=times)
    assert files(str(model)) != before


def test_a_file_replaced_added_or_removed_is_noticed(model: Path) -> None:
    before = files(str(model))
    new = model / "new"
    new.write_text("{}")
    assert files(str(model)) != before
    new.rename(model / "config.json")
    assert files(str(model)) != before
    (model / "config.json").unlink()
    assert files(str(model)) != before


def test_a_name_that_is_no_folder_has_no_files_to_change() -> None:
    assert files("org/model") == ()


async def test_other_bytes_with_the_same_name_size_and_times_are_noticed_before_a_wake(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ModelPlan("a", "x:build", {"model": str(model)}, Need(Bytes(1)), True, "")
    slot = Slot(plan, TicketId("a-1"))
    await freshness.look(slot)
    assert not await freshness.is_stale(slot)
    monkeypatch.setattr(freshness, "files", lambda _: slot.files)  # as a coarse clock has it
    assert not await freshness.is_stale(slot)
    (model / "deep" / "model.safetensors").write_bytes(b"12345679")
    assert not await freshness.has_moved(slot) and await freshness.is_stale(slot)


def test_the_same_bytes_have_the_same_hash_whatever_their_times(model: Path) -> None:
    before, rows = contents(str(model)), files(str(model))
    os.utime(model / "config.json", ns=(1, 1))
    assert contents(str(model)) == before and files(str(model)) != rows


def test_of_a_large_file_its_first_and_last_bytes_and_pieces_between_are_read() -> None:
    assert pieces(WHOLE_BYTES) == [(0, WHOLE_BYTES)]
    size = 10 * WHOLE_BYTES + 1
    found = pieces(size)
    assert found[0][0] == 0 and sum(found[-1]) == size
    assert sum(length for _, length in found) <= WHOLE_BYTES
    assert all(a + n < b for (a, n), (b, _) in pairwise(found))
