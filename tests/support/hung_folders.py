"""Adapter folders on a file server that hangs, or that answers with an error."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deployments.adapters.catalogue import Catalogue
from tests.support.waits import WITHIN_S


@contextmanager
def hung_folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Has looks into adapter folders wait for the event: the server is back. A look for which the
    event loop waits fails."""
    is_back = threading.Event()

    def hanging(look: Callable[..., Any]) -> Callable[..., Any]:
        def waits(*args: Any) -> Any:
            assert is_back.wait(WITHIN_S), "the server is back after the loop has gone on"
            return look(*args)

        return waits

    for name in ("find", "entries", "names"):
        monkeypatch.setattr(Catalogue, name, hanging(getattr(Catalogue, name)))
    try:
        yield is_back
    finally:
        is_back.set()


def failing_folder(monkeypatch: pytest.MonkeyPatch, folder: Path, number: int) -> None:
    """Has the kernel say nothing of what is in a folder, but an error of that number."""
    asked = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        if folder in path.parents:
            raise OSError(number, os.strerror(number), str(path))
        return asked(path)

    monkeypatch.setattr(Path, "lstat", lstat)
