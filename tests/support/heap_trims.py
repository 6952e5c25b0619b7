"""Notes that a process has begun to give freed heap back, in place of doing it."""

import asyncio

import pytest

from arbiter import heap


def begun_trims(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once `heap.trim_forever` runs."""
    begun = asyncio.Event()

    async def trim_forever() -> None:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(heap, "trim_forever", trim_forever)
    return begun
