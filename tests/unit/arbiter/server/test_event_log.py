"""The event log and its file are bounded."""

import contextlib
import json
import os
from pathlib import Path

import pytest

from arbiter.core.decisions import LogEvent
from arbiter.protocol.messages import Plain
from arbiter.server import event_log
from arbiter.server.event_log import LINES_MOST, EventLog
from arbiter.units import Epoch


@pytest.mark.spec("K1")
def test_a_long_event_file_starts_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "FILE_MOST_BYTES", 10)
    with contextlib.closing(EventLog(Epoch(1), tmp_path / "e")) as log:
        log.tell(LogEvent("first", {}))
        log.tell(LogEvent("second", {}))
    assert "first" in (tmp_path / "e.1").read_text()
    assert "second" in (tmp_path / "e").read_text()


@pytest.mark.spec("K1")
async def test_an_event_file_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    log = EventLog(Epoch(1), tmp_path / "no such folder" / "e")
    log.tell(LogEvent("first", {}))
    assert [line["kind"] for line in await log.after(0, 0)] == ["first"]


@pytest.mark.spec("K1")
async def test_full_disk_costs_the_line_in_the_file_and_leaves_no_file_open() -> None:
    full = Path("/dev/full")
    log = EventLog(Epoch(1), full)
    log.tell(LogEvent("first", {}))
    log.tell(LogEvent("second", {}))
    assert [line["kind"] for line in await log.after(0, 0)] == ["first", "second"]
    with os.scandir("/proc/self/fd") as open_files:
        assert not [file for file in open_files if full.samefile(file.path)]


@pytest.mark.spec("K1")
async def test_a_flood_of_runs_pushes_no_other_event_out(tmp_path: Path) -> None:
    with contextlib.closing(EventLog(Epoch(1), tmp_path / "e")) as log:
        log.tell(LogEvent("model_load", {}))
        for _ in range(LINES_MOST + 1):
            log.tell(LogEvent("capability_run", {}))
        log.tell(LogEvent("model_unload", {}))
    kinds = [line["kind"] for line in await log.after(0, 0)]
    assert (kinds[0], kinds[-1], len(kinds)) == ("model_load", "model_unload", LINES_MOST + 2)
    numbers = [json.loads(line)["seq"] for line in (tmp_path / "e").read_text().splitlines()]
    assert numbers == sorted(numbers) and len(numbers) == LINES_MOST + 3


@pytest.mark.spec("K1", "N2")
async def test_subscriber_that_keeps_up_has_no_older_lines_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = EventLog(Epoch(1))
    for kind in ("model_load", "capability_run") * 100:
        log.tell(LogEvent(kind, {}))
    looked_at: list[int] = []

    def note(line: Plain) -> int:
        looked_at.append(line["seq"])
        return int(line["seq"])

    monkeypatch.setattr(event_log, "_sequence", note)
    last = [line["kind"] for line in await log.after(log.sequence - 2, 0)]
    assert last == ["model_load", "capability_run"]
    assert looked_at and len({*looked_at}) <= 4
