"""Processor time of processes that cannot be read."""

from pathlib import Path

import pytest

from benchmarks import processor_time


def test_unreadable_process_is_not_counted_for_the_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def closed(folder: Path, session: str, node: str) -> str | None:
        raise PermissionError(folder)

    monkeypatch.setattr(processor_time, "name_of", closed)
    assert processor_time.look("/tmp/r", "n") == {}
