"""What the node agent removes: folders of nodes that are gone, old logs."""

import os
import time
from pathlib import Path

import pytest

from arbiter.node import cleanup
from arbiter.node.cleanup import EngineLogs, sweep


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
