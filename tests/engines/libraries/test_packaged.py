"""Models in packages: the file that is served is the file that was tried."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models import packaged, shipped

pytestmark = pytest.mark.spec("L2", "M1")


@pytest.mark.parametrize("model", packaged.MODELS, ids=lambda model: model.name)
def test_packaged_model_has_the_expected_files_and_a_licence(model: packaged.Packaged) -> None:
    said = packaged.check(model)
    assert said.startswith(f"{model.name}: ") and "licence: " in said


@pytest.mark.parametrize("model", packaged.MODELS, ids=lambda model: model.name)
def test_licence_of_a_packaged_model_is_in_the_page_of_models(model: packaged.Packaged) -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    [row] = [line for line in page.splitlines() if line.startswith(f"| `{model.name}` |")]
    assert f"| {model.licence} |" in row


def test_other_file_in_the_place_of_a_model_is_refused() -> None:
    vad = packaged.MODELS[-1]
    with pytest.raises(packaged.WrongFile, match=r"sha256 .* expected 0000"):
        packaged.check(replace(vad, files=dict.fromkeys(vad.files, "0000")))
    with pytest.raises(ImportError, match="make install"):
        packaged.check(replace(vad, package="no_such_package"))


@pytest.mark.spec("H6")
def test_weights_of_the_detector_are_those_of_the_torchscript(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = packaged.make_vad(tmp_path / "models")
    written = load_file(folder / "model.safetensors")
    script = torch.jit.load(packaged.folder_of("silero_vad") / "data" / "silero_vad.jit", "cpu")
    theirs = {k: v for k, v in script.state_dict().items() if k.startswith("_model.")}
    assert sum(t.numel() for t in written.values()) == sum(t.numel() for t in theirs.values())
    assert torch.equal(written["rnn.weight_ih"], theirs["_model.decoder.rnn.weight_ih"])
    assert packaged.make_vad(tmp_path / "models") == folder  # made once


def test_weights_made_of_another_torchscript_are_made_anew(tmp_path: Path) -> None:
    folder = packaged.make_vad(tmp_path)
    shipped.seal(folder, packaged.VAD, {"made_from": {"data/silero_vad.jit": "0000"}})
    (folder / "model.safetensors").write_bytes(b"old")
    assert len((packaged.make_vad(tmp_path) / "model.safetensors").read_bytes()) > 1_000_000
