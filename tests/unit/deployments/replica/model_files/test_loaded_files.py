"""A changed model is noticed before its wake, also where one byte of a large file differs (D5)."""

import asyncio
import os
import sys
from pathlib import Path
from traceback import walk_stack

import pytest

from arbiter.core.decisions import Reason
from arbiter.core.types import Need
from arbiter.units import MIB, Bytes, TicketId
from deployments.config.load_plan import ModelPlan
from deployments.config.model_content import pieces
from deployments.replica.held_model import HeldModel, HolderState
from deployments.replica.lifecycle import watchdog
from deployments.replica.model_files import loaded_files
from deployments.replica.model_files.loaded_files import (
    LoadedFiles,
    changed_in_sleep,
    look,
    read_whole,
)
from tests.support.waits import eventually

pytestmark = pytest.mark.spec("D5")
SIZE_BYTES = 64 * MIB


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A large file, read as fast as it goes."""
    monkeypatch.setattr(loaded_files, "READ_BYTES_PER_S", float("inf"))
    path = tmp_path / "model.safetensors"
    with path.open("wb") as stream:
        stream.truncate(SIZE_BYTES)
    return path


def change_a_byte(weights: Path) -> None:
    """In the middle, between two of the pieces that are looked at; with the old mtime."""
    times = weights.stat().st_atime_ns, weights.stat().st_mtime_ns
    read = [range(start, start + length) for start, length in pieces(SIZE_BYTES)]
    at = next(b for b in range(SIZE_BYTES // 2, SIZE_BYTES) if not any(b in r for r in read))
    with weights.open("r+b") as stream:
        stream.seek(at)
        stream.write(b"\1")
    os.utime(weights, ns=times)


def hide_times(loaded: LoadedFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """As within one tick of the clock, or on a file system that keeps no ctime."""
    monkeypatch.setattr(loaded_files, "files", lambda _: loaded.rows)


def all_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_files, "SETTLED_S", 0.0)


async def test_byte_changed_in_the_middle_of_a_large_file_is_noticed_before_a_wake(
    weights: Path,
) -> None:
    loaded = await look(str(weights.parent))
    assert not await read_whole(loaded) and not await changed_in_sleep(loaded)
    change_a_byte(weights)
    assert await changed_in_sleep(loaded)


async def test_byte_changed_right_after_the_file_was_written_is_noticed_without_its_times(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = await look(str(weights.parent))
    hide_times(loaded, monkeypatch)
    assert not await read_whole(loaded) and not await changed_in_sleep(loaded)
    change_a_byte(weights)
    assert not await loaded_files.has_changed(loaded) and await changed_in_sleep(loaded)


async def test_large_file_just_written_and_never_read_whole_counts_as_changed(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = await look(str(weights.parent))
    assert await changed_in_sleep(loaded)
    all_settled(monkeypatch)
    assert not await changed_in_sleep(await look(str(weights.parent)))


async def test_settled_file_is_not_read_whole_before_a_wake(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = await look(str(weights.parent))
    assert loaded.unsettled() == [weights.name]
    await read_whole(loaded)
    assert loaded.unsettled() == [weights.name]  # its ctime is of just now
    all_settled(monkeypatch)
    await read_whole(loaded)
    assert loaded.unsettled() == []


async def test_file_that_cannot_be_read_whole_tells_nothing(weights: Path) -> None:
    loaded = await look(str(weights.parent))
    weights.unlink()
    assert not await read_whole(loaded) and loaded.whole == {}


async def test_byte_changed_while_asleep_ends_the_model_where_times_tell_nothing(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "LOOK_S", 0.001)
    all_settled(monkeypatch)
    plan = ModelPlan("a", "x:build", {"model": str(weights.parent)}, Need(Bytes(1)), True, "")
    held = HeldModel(plan, TicketId("a-1"), HolderState.RESIDENT)
    held.files = await look(str(weights.parent))
    hide_times(held.files, monkeypatch)
    ends: list[Reason] = []
    watching = asyncio.ensure_future(
        watchdog.watch_files(held, lambda _: None, lambda _, reason: ends.append(reason))
    )
    await eventually(lambda: held.files.whole)
    change_a_byte(weights)
    assert not await changed_in_sleep(held.files) and not ends
    held.state = HolderState.ASLEEP
    await asyncio.wait_for(watching, 90)
    assert ends == [Reason.REPLACED]


async def test_end_of_a_model_does_not_wait_for_a_read_of_its_files(tmp_path: Path) -> None:
    """The server of the files is away, and the read does not return."""
    os.mkfifo(tmp_path / "weights")
    writer = os.open(tmp_path / "weights", os.O_RDWR)  # opens need not wait, and reads do
    try:
        reading = asyncio.ensure_future(
            loaded_files._hash_of(LoadedFiles(str(tmp_path)), "weights", 0.0)
        )
        await eventually(lambda: threads_in("_feed"))
        reading.cancel()
        await asyncio.wait({reading}, timeout=60)
        assert reading.cancelled() and threads_in("_feed"), "it ended before the read did"
    finally:
        os.close(writer)
    await eventually(lambda: not threads_in("_feed"))


def threads_in(function: str) -> bool:
    """Whether a thread is in a call of this name."""
    frames = [frame for top in sys._current_frames().values() for frame, _ in walk_stack(top)]
    return any(frame.f_code.co_name == function for frame in frames)
