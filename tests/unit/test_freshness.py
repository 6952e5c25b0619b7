"""Whether a model's files are those it was loaded from."""

import os
from pathlib import Path

import pytest

from deployments.freshness import files

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
