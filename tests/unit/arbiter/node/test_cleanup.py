"""What the node agent removes: folders of nodes that are gone, old logs."""

import errno
import json
import os
import time
from pathlib import Path

import pytest

from arbiter.node import cleanup
from arbiter.node.children import Children
from arbiter.node.cleanup import EngineLogs, sweep
from arbiter.units import TicketId

T = TicketId("t")


def test_folders_of_nodes_that_are_gone_are_removed_and_others_are_not(tmp_path: Path) -> None:
    import fcntl

    own, gone, held, young = (tmp_path / n for n in ("own", "gone", "held", "young"))
    for path in (own, gone, held, young):
        path.mkdir()
        (path / "zygote.lock").touch()
    long_ago_s = time.time() - cleanup.ABANDONED_AFTER_S - 60
    for path in (own, gone, held):
        os.utime(path, (long_ago_s, long_ago_s))
    with (held / "zygote.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sweep(own)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["held", "own", "young"]


@pytest.mark.spec("B2")
def test_only_folders_that_an_agent_made_are_removed(tmp_path: Path) -> None:
    """The dispatch locks of living engines lie beside them, and are old by then."""
    gone, locks = tmp_path / "gone", tmp_path / "dispatch"
    long_ago_s = time.time() - cleanup.ABANDONED_AFTER_S - 60
    for path in (gone / "t.child", locks / "torch.lock"):
        path.parent.mkdir()
        path.touch()
        os.utime(path.parent, (long_ago_s, long_ago_s))
    sweep(tmp_path / "own")
    assert [p.name for p in tmp_path.iterdir()] == ["dispatch"]


def test_only_the_newest_logs_of_ended_engines_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleanup, "LOGS_KEPT", 2)
    logs = EngineLogs(tmp_path)
    living = tmp_path / "living.log"
    living.touch()
    logs.link("living", living)
    for age_s, ticket in ((30, "old"), (20, "newer"), (10, "newest")):
        written = tmp_path / f"{ticket}.log"
        written.write_text(ticket)
        os.utime(written, (1e9 - age_s, 1e9 - age_s))
        logs.keep(ticket, written)
    left = {p.name for p in tmp_path.glob("engine-*.log")}
    assert left == {"engine-living.log", "engine-newer.log", "engine-newest.log"}
    assert (tmp_path / "engine-newest.log").read_text() == "newest"


def test_log_of_a_living_engine_is_cut_to_its_last_lines_and_written_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleanup, "LOG_MOST_BYTES", 1_000)
    monkeypatch.setattr(cleanup, "LOG_END_BYTES", 100)
    folder, written = tmp_path / "logs", tmp_path / "t.log"
    folder.mkdir()
    logs = EngineLogs(folder)
    logs.link(T, written)
    with written.open("a") as engine:  # as an engine has its output
        engine.write("".join(f"line {n:03}\n" for n in range(111)))
        engine.flush()
        logs.shorten([T, "gone"])
        assert written.stat().st_size == 999, "it is no longer than a log may be"
        engine.write("line 111\n")
        engine.flush()
        logs.shorten([T, "gone"])
        engine.write("line 112\n")
    kept = [f"line {n:03}" for n in range(101, 113)]
    assert written.read_text().splitlines() == ["-- 908 bytes of this log were cut", *kept]


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the logs go."""

    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cleanup.shutil, "move", fails)
    monkeypatch.setattr(Path, "symlink_to", fails)


@pytest.mark.usefixtures("full_disk")
def test_log_that_finds_no_room_costs_no_engine_and_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logs, written = EngineLogs(tmp_path / "logs"), tmp_path / "t.log"
    written.touch()
    logs.link(T, written)
    logs.keep(T, written)
    warned = [r.getMessage() for r in caplog.records]
    assert len(warned) == 2 and all("engine t" in w and "No space left" in w for w in warned)


@pytest.mark.usefixtures("full_disk")
@pytest.mark.spec("A18")
def test_agent_starts_and_removes_what_dead_engines_left_though_their_logs_find_no_room(
    tmp_path: Path,
) -> None:
    left = [tmp_path / f"{T}.{kind}" for kind in ("child", "log", "sock")]
    for path in left:
        path.touch()
    named = {"ticket": T, "pid": os.getpid(), "start_ticks": 1, "granted": []}  # another's pid
    left[0].write_text(json.dumps(named))
    logs = EngineLogs(tmp_path / "logs")
    assert Children(tmp_path).recover(logs.keep) == (T,)
    assert not any(path.exists() for path in left)


def test_log_that_another_agent_of_the_machine_drops_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes of a cluster may be on one machine, and have one folder of logs."""
    logs, written, other = EngineLogs(tmp_path), tmp_path / "t.log", tmp_path / "engine-other.log"
    written.touch()
    other.touch()
    real = Path.stat

    def stat(path: Path, **how: bool) -> os.stat_result:
        if path == other:
            other.unlink(missing_ok=True)
        return real(path, **how)

    monkeypatch.setattr(Path, "stat", stat)
    logs.keep(T, written)
    assert (tmp_path / f"engine-{T}.log").exists()


def test_folder_that_another_agent_of_the_machine_removes_meanwhile_is_no_error(
    tmp_path: Path,
) -> None:
    assert not cleanup._is_abandoned(tmp_path / "gone")
