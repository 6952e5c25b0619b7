"""One state file has one life of a cluster at a time."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from arbiter.errors import StateFileInUse
from arbiter.protocol import ray_internals
from arbiter.server.state_lock import hold
from tests.support.local_arbiter import Running

pytestmark = pytest.mark.spec("A18")

HOLDS = """
import sys
from pathlib import Path
from arbiter.server.state_lock import hold
hold(Path(sys.argv[1]), "one")
print("held", flush=True)
sys.stdin.read()
"""


def test_another_life_is_refused_with_the_file_its_holder_and_the_ways_out(tmp_path: Path) -> None:
    file = tmp_path / "new" / "arbiter.sqlite"
    assert hold(file, "one") is not None
    with pytest.raises(StateFileInUse) as refused:
        hold(file, "two", wait_s=0)
    for word in (str(file), "one", str(os.getpid()), "arbiter.state_file", "XDG_STATE_HOME"):
        assert word in str(refused.value)


def test_next_arbiter_of_the_same_life_is_let_in_beside_the_last(tmp_path: Path) -> None:
    file = tmp_path / "arbiter.sqlite"
    first, second = hold(file, "one"), hold(file, "one", wait_s=0)
    assert first is not None and second is not None
    os.close(first)
    with pytest.raises(StateFileInUse):
        hold(file, "two", wait_s=0)
    os.close(second)
    assert hold(file, "two", wait_s=0) is not None


def test_lock_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    file = tmp_path / "arbiter.sqlite"
    command = [sys.executable, "-c", HOLDS, str(file)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(StateFileInUse, match=str(holder.pid)):
            hold(file, "two", wait_s=0)
        holder.kill()
        assert hold(file, "two", wait_s=60) is not None


def test_life_that_is_just_ending_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "arbiter.sqlite"
    first = hold(file, "one")
    assert first is not None
    held: list[int | None] = []
    waits = threading.Thread(target=lambda: held.append(hold(file, "two", wait_s=60)))
    waits.start()
    os.close(first)
    waits.join(60)
    assert held and held[0] is not None


def test_folder_in_which_nothing_can_be_written_is_not_locked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert hold(tmp_path / "file" / "arbiter.sqlite", "one") is None


async def test_arbiter_of_another_system_does_not_start_on_the_same_state_file(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arbiter.server.state_lock.HELD_S", 0.0)
    async with running(), running():
        monkeypatch.setattr(ray_internals, "session_name", lambda: "of another system")
        with pytest.raises(StateFileInUse, match="session"):
            async with running():
                raise AssertionError("it started")
    async with running():
        pass
