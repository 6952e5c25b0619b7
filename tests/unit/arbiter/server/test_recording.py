"""What is recorded is read back exactly, decides the same again, and can be asked what if."""

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from arbiter.core import events as ev
from arbiter.core.arbiter import Arbiter
from arbiter.core.decisions import Decision
from arbiter.core.records.reuse import ReuseLearner
from arbiter.protocol.messages import protocol_hash
from arbiter.replay.recorded import NothingLoaded
from arbiter.replay.score import Score
from arbiter.replay.world import World
from arbiter.server import recording
from arbiter.server.recording import (
    Recorder,
    RecordingHeader,
    RecordingUnreadable,
    read,
    replay,
)
from arbiter.units import Epoch, Instant
from benchmarks.replay import mixes, traces
from benchmarks.replay.table import SETTINGS
from deployments.cli.main import main
from deployments.cli.replay import compared, learned_before
from policies import bundle


class RecordedArbiter:
    """A core whose events go into a file, as the shell does it."""

    def __init__(self, core: Arbiter, path: Path) -> None:
        self._core, self.settings = core, core.settings
        heading = RecordingHeader(protocol_hash(), core.settings, core.epoch, (), None, Instant(0))
        self.recorder = Recorder(path, heading)

    def handle(self, event: ev.Event, now: Instant) -> list[Decision]:
        self.recorder.event(event, now)
        decisions = self._core.handle(event, now)
        self.recorder.decided(decisions)
        return decisions


def record(path: Path, requests: int = 400, evict: str = "priority_lru") -> Score:
    """A day of a drawn trace."""
    asked = mixes.demand(traces.synthetic(requests, seed=7), mixes.SERVER, 0.3, seed=7)
    chosen = replace(SETTINGS, evict=evict)
    world = World(asked, chosen, bundle(chosen))
    recorded = RecordedArbiter(world.core, path)
    world.core = recorded  # type: ignore[assignment]
    with contextlib.closing(recorded.recorder):
        return world.run()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Score]:
    path = tmp_path_factory.mktemp("recording") / "log.jsonl"
    return path, record(path)


@pytest.mark.spec("K3")
def test_replay_with_the_same_policy_gives_the_recorded_decisions(log: tuple[Path, Score]) -> None:
    [epoch] = read(log[0])
    steps = list(replay(epoch, bundle(epoch.heading.settings)))
    assert len(steps) > 1000
    assert all(step.is_same for step in steps)
    other = list(replay(epoch, bundle(replace(epoch.heading.settings, evict="time_of_day"))))
    assert not other[-1].is_same


@pytest.mark.spec("K3", "N4")
def test_recording_under_learned_prices_decides_the_same_again_and_begins_with_what_was_learned(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log.jsonl"
    record(path, requests=100, evict="learned")
    [epoch] = read(path)
    assert all(step.is_same for step in replay(epoch, bundle(epoch.heading.settings)))
    before = compared(path, [])["policies"]["learned"]
    # What was used last is worth least, and nothing is learned.
    contrary = ReuseLearner(born=(0, 0, 0, 9, 0, 0, 0, 0, 0), doubt=(0,) * 9)
    usage = epoch.heading.core(bundle(SETTINGS)).export_usage() | {"reuse": contrary.export()}
    (heading, *lines) = path.read_text().splitlines()
    knowing = json.loads(heading)
    knowing["heading"]["usage"] = usage
    path.write_text("\n".join([json.dumps(knowing), *lines, ""]))
    assert learned_before(read(path)[0].heading) == {"reuse": usage["reuse"]}
    assert compared(path, [])["policies"]["learned"]["waited_s"] != before["waited_s"]


@pytest.mark.spec("K3")
def test_replay_in_another_process_gives_the_recorded_decisions(log: tuple[Path, Score]) -> None:
    """Sets and hashes differ between processes; decisions may not."""
    code = (
        "import sys; from pathlib import Path\n"
        "from arbiter.server.recording import read, replay; from policies import bundle\n"
        "[epoch] = read(Path(sys.argv[1]))\n"
        "print(all(s.is_same for s in replay(epoch, bundle(epoch.heading.settings))))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "4242"}
    root = Path(__file__).parents[4]
    said = subprocess.run(
        [sys.executable, "-c", code, str(log[0])],
        env=env, cwd=root, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert said.stdout.strip() == "True"


@pytest.mark.spec("K3")
def test_whatif_compares_loads_bytes_and_waits_with_foresight(log: tuple[Path, Score]) -> None:
    path, lived = log
    found = compared(path, ["time_of_day"])
    assert found["decided_as_recorded"] == found["events"]
    rows = found["policies"]
    assert list(rows) == ["priority_lru", "time_of_day", "belady"]
    # The demand read from the log is that which was lived, nearly: use is told by heartbeats.
    assert rows["priority_lru"]["loads_count"] == pytest.approx(lived.loads_count, rel=0.1)
    assert rows["belady"]["waited_s"] < rows["time_of_day"]["waited_s"]
    assert rows["time_of_day"]["waited_s"] != rows["priority_lru"]["waited_s"]
    assert rows["belady"]["regret_waited_s"] == 0 < rows["priority_lru"]["regret_waited_s"]


def test_whatif_command_prints_the_comparison(
    log: tuple[Path, Score], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["whatif", str(log[0]), "--policy", "cost_aware"]) == 0
    said = capsys.readouterr().out
    assert "decides all of them as it was recorded" in said
    policies = ["priority_lru", "cost_aware", "belady"]
    assert [line.split()[0] for line in said.splitlines()] == [said.split()[0], "policy", *policies]
    assert main(["whatif", str(log[0]), "--policy", "cost_aware", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["policies"]) == policies
    assert found["decided_as_recorded"] == found["events"]


def test_recording_is_private_appends_epochs_and_skips_a_truncated_line(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log.jsonl"
    record(path, requests=20)
    record(path, requests=20)
    assert path.stat().st_mode & 0o777 == 0o600
    whole = read(path)
    assert len(whole) == 2
    path.write_text(path.read_text()[:-9])
    cut = read(path)
    assert len(cut[1].events) == len(whole[1].events) - 1


def test_a_full_file_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "FILE_MOST_BYTES", 20_000)
    path = tmp_path / "log.jsonl"
    assert record(path, requests=100).requests_count > 50
    assert path.stat().st_size < 22_000
    [epoch] = read(path)
    steps = list(replay(epoch, bundle(epoch.heading.settings)))
    assert steps and all(step.is_same for step in steps)


def test_disk_that_fills_up_ends_the_recording_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    recorder = Recorder(path, RecordingHeader("p", SETTINGS, Epoch(1), (), None, Instant(0)))
    size = path.stat().st_size
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, recorder._file.fileno())
    os.close(full)
    for at in (1, 2):
        recorder.event(ev.TimerFired(), Instant(at))
    recorder.close()
    assert path.stat().st_size == size
    with pytest.raises(OSError, match="No space"):
        Recorder(Path("/dev/full"), RecordingHeader("p", SETTINGS, Epoch(1), (), None, Instant(0)))


def test_unreadable_recording_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.jsonl"
    with pytest.raises(RecordingUnreadable, match="No such file"):
        read(path)
    path.write_text('{"seq": 1}\n')
    with pytest.raises(RecordingUnreadable, match="line 1"):
        read(path)
    other = RecordingHeader("other", SETTINGS, Epoch(1), (), None, Instant(0))
    path.unlink()
    Recorder(path, other).close()
    assert main(["whatif", str(path)]) == 1
    assert "recorded by other code" in capsys.readouterr().err


def test_a_recording_without_a_load_has_nothing_to_compare(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    heading = RecordingHeader(protocol_hash(), SETTINGS, Epoch(1), (), None, Instant(0))
    Recorder(path, heading).close()
    with pytest.raises(NothingLoaded):
        compared(path, [])
