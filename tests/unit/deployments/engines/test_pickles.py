"""Which files of a model are pickles that would be read."""

from pathlib import Path

import pytest

from deployments.engines import pickles
from deployments.engines.protocol import EngineLoadFailed


@pytest.mark.spec("L2")
@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "last.ckpt"]
)
def test_weights_in_a_pickle_are_refused_by_name(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"")
    with pytest.raises(EngineLoadFailed, match=f"{file.name} is a pickle"):
        pickles.refuse(tmp_path)


@pytest.mark.parametrize("name", ["openvino_model.bin", "vocab.bin", "original/model.pth"])
def test_other_files_are_no_pickles(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"")
    pickles.refuse(tmp_path)


def test_pickle_beside_safetensors_is_left_unread(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    pickles.refuse(tmp_path)
