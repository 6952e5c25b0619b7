"""The recipe of the default model of pictures, run for a few steps."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from models import shipped, train_images
from models.train_images import Recipe

SHORT = Recipe(drawings_per_fact=1, autoencoder_steps=4, denoiser_steps=4, denoiser_batch=8)


@pytest.fixture(scope="module", autouse=True)
def often() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_images, "CHECKPOINT_EVERY", 2)
        yield


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def whole(work: Path, often: None) -> Any:
    """A training that nothing interrupted; its checkpoints are in `work`."""
    return train_images.train(SHORT, work)


def weights(pipe: Any) -> list[torch.Tensor]:
    modules = (pipe.vae, pipe.text_encoder, pipe.unet)
    return [p for module in modules for p in module.parameters()]


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


@pytest.mark.spec("M1")
def test_an_interrupted_training_goes_on_to_the_weights_of_an_uninterrupted_one(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = train_images.Descent.step
    done: list[int] = []

    def stop(self: Any, loss: torch.Tensor) -> None:
        if len(done) == 7:  # in the denoiser, one step after its checkpoint
            raise KeyboardInterrupt
        done.append(1)
        step(self, loss)

    monkeypatch.setattr(train_images.Descent, "step", stop)
    with pytest.raises(KeyboardInterrupt):
        train_images.train(SHORT, tmp_path / "parts")
    monkeypatch.setattr(train_images.Descent, "step", step)
    assert same(train_images.train(SHORT, tmp_path / "parts"), whole)
    other = train_images.train(replace(SHORT, seed=1), tmp_path / "other")
    assert not same(other, whole)


@pytest.mark.parametrize("other", [{"denoiser_steps": 6}, {"seed": 1}, {"denoiser_batch": 4}])
def test_a_checkpoint_of_another_recipe_is_refused(
    whole: Any, work: Path, other: dict[str, int]
) -> None:
    with pytest.raises(ValueError, match="of another recipe"):
        train_images.train(replace(SHORT, **other), work)  # type: ignore[arg-type]


@pytest.mark.spec("M1")
def test_training_writes_a_pipeline_that_unpacks_and_its_manifest(tmp_path: Path) -> None:
    out = tmp_path / "out"
    train_images.make(out, tmp_path / "work", SHORT)
    manifest = json.loads((out / shipped.MANIFEST).read_text())
    assert manifest["model"] == train_images.NAME
    assert not list((tmp_path / "work").iterdir())  # the next training begins anew
    assert manifest["recipe"]["autoencoder_steps"] == 4
    assert manifest["right"]["pictures"] == 224
    folder = shipped.unpack(out, tmp_path / "models")
    assert folder.name == train_images.NAME
    assert (folder / "unet" / "diffusion_pytorch_model.safetensors").is_file()


def test_training_lowers_the_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = replace(SHORT, autoencoder_steps=14, autoencoder_batch=8, denoiser_steps=14)
    train_images.train(recipe, tmp_path)
    said = capsys.readouterr().out
    for part in ("autoencoder", "denoiser"):
        lines = [line for line in said.splitlines() if f"] {part} " in line and "loss" in line]
        first, *_, last = (float(line.split()[-1]) for line in lines)
        assert last < first, lines
