"""A slab for each test."""

from collections.abc import Iterator

import pytest

from tests.support.slabs import Clock, slab_file


@pytest.fixture
def fd() -> Iterator[int]:
    with slab_file() as made:
        yield made


@pytest.fixture
def clock() -> Clock:
    return Clock()
