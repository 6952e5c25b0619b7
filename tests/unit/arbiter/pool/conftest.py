"""A slab for each test."""

from collections.abc import Iterator

import pytest

from tests.support.slabs import slab_file


@pytest.fixture
def fd() -> Iterator[int]:
    with slab_file() as made:
        yield made
