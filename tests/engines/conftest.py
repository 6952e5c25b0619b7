"""Shared by the tests that run real engines: made models, and one zygote per session."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from models.make_models import SMALL, TINY, default_folder, make
from tests.support.engine_host import ZygoteUnderTest, zygote

ENGINES = "deployments.engines.vllm.preload,deployments.engines.sentence_transformers"


@pytest.fixture(scope="session")
def tiny() -> Path:
    return make(default_folder(), TINY)


@pytest.fixture(scope="session")
def small() -> Path:
    return make(default_folder(), SMALL)


@pytest.fixture(scope="session")
def engines() -> Iterator[ZygoteUnderTest]:
    """A zygote with every real engine's imports done."""
    with zygote(ENGINES) as running:
        yield running
