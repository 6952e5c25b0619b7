"""The recipe of the model that describes drawings, run for a few steps; and what is carried."""

import json
from pathlib import Path

import pytest
import torch
from transformers import Idefics3ForConditionalGeneration

from models import shapes, shipped, train_vision
from models.train_vision import Plan, Training

SHORT = Plan(eye_steps=6, text_steps=4, pictures=1, log_every=100)


@pytest.mark.spec("M1", "H2")
def test_short_training_learns_and_writes_a_model_that_unpacks(tmp_path: Path) -> None:
    training = Training(SHORT, tmp_path / "scratch")
    training.run()
    seeing, saying = training.losses[: SHORT.eye_steps], training.losses[SHORT.eye_steps :]
    assert seeing[-1] < seeing[0] and saying[-1] < saying[0]
    scores = train_vision.save(training, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / shipped.MANIFEST).read_text())
    assert manifest["reached"] == scores
    assert manifest["recipe"]["eye_steps"] == SHORT.eye_steps
    folder = shipped.unpack(tmp_path / "out", tmp_path / "models")
    loaded = Idefics3ForConditionalGeneration.from_pretrained(folder, dtype=torch.bfloat16)
    for name, tensor in training.model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name


@pytest.mark.spec("M1", "H2")
def test_carried_weights_are_small_and_reached_what_is_asked(tmp_path: Path) -> None:
    source = shipped.WEIGHTS / "vision"
    manifest = json.loads((source / shipped.MANIFEST).read_text())
    assert manifest["model"] == train_vision.NAME
    reached = manifest["reached"]
    assert reached["drawings"] == len(shapes.all_facts())
    assert min(reached["right"].values()) >= 0.98 * reached["drawings"]
    assert sum(f.stat().st_size for f in source.rglob("*")) < 3 << 20
    shipped.unpack(source, tmp_path)  # raises where a file is not the one meant


@pytest.mark.spec("H2")
def test_outline_has_the_shapes_share_of_each_cell(tmp_path: Path) -> None:
    training = Training(SHORT, tmp_path)
    fact = torch.arange(len(training.facts))
    pixels = train_vision.normalised(training.drawings.pixels)
    drawn = training.heads._outline(pixels[:, 0], fact)
    assert drawn.shape == (len(fact), 64, 16)
    covered = drawn.mean(dim=(1, 2))
    by_shape = {
        shape: covered[[f.shape == shape for f in training.facts]].mean().item()
        for shape in shapes.SHAPES
    }
    # Of the picture, at a radius of 0.3: a square 0.36, a circle 0.28, a triangle half a square,
    # a cross two bars of 0.38 of its width.
    assert by_shape["square"] == pytest.approx(0.36, abs=0.04)
    assert by_shape["circle"] == pytest.approx(0.28, abs=0.04)
    assert by_shape["triangle"] == pytest.approx(0.18, abs=0.04)
    assert by_shape["cross"] == pytest.approx(0.22, abs=0.04)
