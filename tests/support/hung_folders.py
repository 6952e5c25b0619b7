"""Adapter folders on a file server that hangs."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
