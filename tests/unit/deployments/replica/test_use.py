"""The outcome of a use is a word."""

import asyncio
from typing import Any

import pytest

from arbiter.errors import LoadFailed
from deployments.replica.use import outcome_of


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "answered"),
        (asyncio.CancelledError(), "left"),
        (GeneratorExit(), "left"),
        (LoadFailed("m", "broken", False), "load_failed"),
        (KeyError("a bug"), "failed"),
    ],
)
def test_an_outcome_is_a_word(error: Any, outcome: str) -> None:
    assert outcome_of(error) == outcome
