"""The oracle of drawings: it reads what was drawn, and nothing else."""

import numpy as np
import pytest
from PIL import Image

from models.shapes import SIZE, Fact, all_facts, draw, read


def test_the_oracle_reads_every_drawing_as_it_was_drawn() -> None:
    random = np.random.default_rng(1)
    facts = [fact for fact in all_facts() for _ in range(3)]
    assert len(facts) == 672
    assert [fact for fact in facts if read(draw(fact, random)).fact != fact] == []


def test_the_oracle_reads_a_drawing_of_another_size() -> None:
    fact = Fact("green", "cross", "white")
    assert read(draw(fact).resize((256, 256))).fact == fact


@pytest.mark.parametrize("colour", [(220, 30, 30), (0, 0, 0)])
def test_a_picture_of_one_colour_shows_no_shape(colour: tuple[int, int, int]) -> None:
    assert read(Image.new("RGB", (SIZE, SIZE), colour)).fact is None


def test_noise_fits_no_shape() -> None:
    random = np.random.default_rng(0)
    noise = Image.fromarray(random.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8))
    fits = [read(draw(fact)).fit for fact in all_facts()]
    assert read(noise).fit < 0.5
    assert min(fits) > 0.9


def test_a_caption_says_the_three_facts() -> None:
    assert Fact("red", "circle", "blue").caption == "a red circle on blue"
