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


def test_time_of_the_engine_is_no_part_of_what_is_outside_it() -> None:
    rows = {"engine core": 5.0, "engine frontend": 2.0, "front": 0.5, "log monitor": 0.25}
    assert processor_time.outside(rows) == 0.75
