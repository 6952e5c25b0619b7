"""Weights that the repository carries: unpacked whole, and only if they are the ones it means."""

import json
from pathlib import Path

import pytest

from models import shipped


@pytest.fixture
def carried(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    (folder / "unet").mkdir(parents=True)
    (folder / "model_index.json").write_text("{}")
    (folder / "unet" / "model.safetensors").write_bytes(b"weights")
    shipped.seal(folder, "tiny", {"recipe": {"seed": 0}})
    return folder


@pytest.mark.spec("L2", "M1")
def test_a_model_is_unpacked_with_all_its_files(carried: Path, tmp_path: Path) -> None:
    found = shipped.unpack(carried, tmp_path / "models")
    assert found == tmp_path / "models" / "tiny"
    assert (found / "unet" / "model.safetensors").read_bytes() == b"weights"
    assert json.loads((found / shipped.MANIFEST).read_text())["recipe"] == {"seed": 0}
    inode = found.stat().st_ino
    assert shipped.unpack(carried, tmp_path / "models").stat().st_ino == inode  # left alone


@pytest.mark.spec("L2")
def test_a_changed_file_is_not_unpacked(carried: Path, tmp_path: Path) -> None:
    (carried / "unet" / "model.safetensors").write_bytes(b"others!")
    with pytest.raises(shipped.Damaged, match=r"model\.safetensors: sha256"):
        shipped.unpack(carried, tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


def test_new_weights_replace_the_old_ones(carried: Path, tmp_path: Path) -> None:
    shipped.unpack(carried, tmp_path / "models")
    (carried / "unet" / "model.safetensors").write_bytes(b"better")
    shipped.seal(carried, "tiny", {})
    found = shipped.unpack(carried, tmp_path / "models")
    assert (found / "unet" / "model.safetensors").read_bytes() == b"better"


@pytest.mark.spec("L2")
def test_damaged_file_in_place_is_unpacked_again(carried: Path, tmp_path: Path) -> None:
    found = shipped.unpack(carried, tmp_path / "models")
    (found / "unet" / "model.safetensors").write_bytes(b"wei")
    found = shipped.unpack(carried, tmp_path / "models")
    assert (found / "unet" / "model.safetensors").read_bytes() == b"weights"
