"""When status messages are written, and where Ray reads them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.dashboard.modules.event.event_utils import parse_event_strings

from arbiter.core.decisions import EventKind
from arbiter.protocol import dashboard_events
from arbiter.server.status_log import StatusLog
from tests.support.waits import eventually

pytestmark = pytest.mark.spec("K5")


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Closes what event_writer opens for as long as its process lives."""
    opened: list[dashboard_events._Parts] = []

    class Noted(dashboard_events._Parts):
        def __init__(self, first: Path) -> None:
            super().__init__(first)
            opened.append(self)

    monkeypatch.setattr(dashboard_events, "_Parts", Noted)
    yield
    for handler in opened:
        handler.close()


async def test_a_message_is_written_once_for_each_change() -> None:
    now, told, looks = {"chat#1": "holds a.", "n1/cpu:0": "lent."}, list[tuple[str, str]](), 0

    def messages() -> dict[str, str]:
        nonlocal looks
        looks += 1
        return dict(now)

    log = StatusLog(messages, lambda about, message: told.append((about, message)), settle_s=0.0)
    log.note(EventKind.CAPABILITY_RUN)
    for _ in range(3):
        log.note(EventKind.MODEL_LOAD)
    await eventually(lambda: told)
    assert (told, looks) == ([("chat#1", "holds a."), ("n1/cpu:0", "lent.")], 1)
    log.note(EventKind.MODEL_UNLOAD)
    await eventually(lambda: looks == 2)
    assert len(told) == 2, "nothing has changed"
    del now["chat#1"]
    log.note(EventKind.HOLDER_LOST)
    await eventually(lambda: looks == 3)
    assert told[2:] == [("chat#1", "chat#1 has left.")]


@pytest.mark.usefixtures("parts")
def test_lines_are_in_the_form_that_rays_dashboard_reads(tmp_path: Path) -> None:
    write = dashboard_events.event_writer(tmp_path, "arbiter-7")
    write("chat#1", "chat#1 holds no model.")
    [file] = (tmp_path / "events").iterdir()
    assert "COMMON" in file.name and file.suffix == ".log", "as it looks for sources"
    [row] = parse_event_strings(file.read_text().splitlines())
    assert (row["message"], row["severity"]) == ("chat#1 holds no model.", "INFO")
    assert row["custom_fields"] == {"about": "chat#1"}


@pytest.mark.usefixtures("parts")
def test_the_newest_two_parts_are_kept_and_no_file_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would take a later file of the same inode for a file that it has read."""
    monkeypatch.setattr(dashboard_events, "PART_BYTES", 2_000)
    write = dashboard_events.event_writer(tmp_path, "arbiter-7")
    for number in range(40):
        write("chat#1", f"message {number}")
    parts = sorted((tmp_path / "events").iterdir(), key=lambda p: (len(p.name), p.name))
    assert len(parts) > 4
    assert {part.stat().st_size for part in parts[:-2]} == {0}
    lines = [json.loads(line) for part in parts[-2:] for line in part.read_text().splitlines()]
    assert lines[-1]["message"] == "message 39" and len(lines) > 5
