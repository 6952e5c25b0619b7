"""What a node agent needs of the world, without Ray."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.exceptions import RayError

from arbiter.node import reports


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="kp-") as made:
        yield Path(made)


@pytest.fixture
def no_arbiter(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_actor(*_: object, **__: object) -> None:
        raise RayError("no cluster")

    monkeypatch.setattr(reports.ray, "get_actor", no_actor)


@pytest.fixture
def granted(no_arbiter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ticket is."""

    async def confirm(*_: object) -> None: ...

    monkeypatch.setattr(reports.Reports, "confirm", confirm)
