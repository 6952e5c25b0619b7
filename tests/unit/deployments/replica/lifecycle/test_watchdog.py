"""Whether a model's files are those it was loaded from."""

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from arbiter.core.decisions import Reason
from arbiter.core.types import Need
from arbiter.errors import EngineLost
from arbiter.units import Bytes, TicketId
from deployments.config.load_plan import ModelPlan
from deployments.config.model_content import WHOLE_BYTES, contents, files, pieces
from deployments.replica.held_model import HeldModel, HolderState
from deployments.replica.lifecycle import watchdog
from deployments.replica.lifecycle.watchdog import start_watchdog
from deployments.replica.model_files import file_events, loaded_files
from deployments.replica.model_files.loaded_files import LoadedFiles
from deployments.routing.pieces import KeptKv
from tests.support.waits import eventually

pytestmark = pytest.mark.spec("D5")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "deep" / "model.safetensors").write_bytes(b"12345678")
    return tmp_path


def test_unchanged_files_compare_equal(model: Path) -> None:
    assert files(str(model)) == files(str(model)) and len(files(str(model))) == 2


def test_a_file_rewritten_in_place_with_its_old_time_and_size_is_noticed(model: Path) -> None:
    file, before = model / "deep" / "model.safetensors", files(str(model))
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_bytes(b"87654321")
    os.utime(file, ns=times)
    assert files(str(model)) != before


def test_a_file_replaced_added_or_removed_is_noticed(model: Path) -> None:
    before = files(str(model))
    new = model / "new"
    new.write_text("{}")
    assert files(str(model)) != before
    new.rename(model / "config.json")
    assert files(str(model)) != before
    (model / "config.json").unlink()
    assert files(str(model)) != before


def test_a_name_that_is_no_folder_has_no_files_to_change() -> None:
    assert files("org/model") == ()


async def test_other_bytes_with_the_same_name_size_and_times_are_noticed_before_a_wake(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ModelPlan("a", "x:build", {"model": str(model)}, Need(Bytes(1)), True, "")
    held = HeldModel(plan, TicketId("a-1"))
    held.files = await loaded_files.look(str(model))
    assert not await loaded_files.changed_in_sleep(held.files)
    monkeypatch.setattr(loaded_files, "files", lambda _: held.files.rows)  # as a coarse clock
    assert not await loaded_files.changed_in_sleep(held.files)
    (model / "deep" / "model.safetensors").write_bytes(b"12345679")
    assert not await loaded_files.has_changed(held.files) and await loaded_files.changed_in_sleep(
        held.files
    )


def test_the_same_bytes_have_the_same_hash_whatever_their_times(model: Path) -> None:
    rows = files(str(model))
    before = contents(str(model), rows)
    os.utime(model / "config.json", ns=(1, 1))
    assert contents(str(model), rows) == before and files(str(model)) != rows


def test_hash_of_a_large_file_reads_its_ends_and_pieces_between() -> None:
    assert pieces(WHOLE_BYTES) == [(0, WHOLE_BYTES)]
    size = 10 * WHOLE_BYTES + 1
    found = pieces(size)
    assert found[0][0] == 0 and sum(found[-1]) == size
    assert sum(length for _, length in found) <= WHOLE_BYTES
    assert all(a + n < b for (a, n), (b, _) in pairwise(found))


def test_a_model_in_one_file_is_watched_like_a_folder(tmp_path: Path) -> None:
    model = tmp_path / "toy.gguf"
    model.write_bytes(b"12345678")
    before = files(str(model))
    hash_before = contents(str(model), before)
    assert before == files(str(model)) and len(before) == 1
    (tmp_path / "new").write_bytes(b"87654321")
    (tmp_path / "new").rename(model)
    assert files(str(model)) != before and contents(str(model), before) != hash_before


async def loaded(model: Path) -> HeldModel:
    plan = ModelPlan("a", "x:build", {"model": str(model)}, Need(Bytes(1)), True, "")
    held = HeldModel(plan, TicketId("a-1"), HolderState.RESIDENT)
    held.files = await loaded_files.look(str(model))
    return held


async def test_replaced_file_is_noticed_beside_an_unreadable_link(model: Path) -> None:
    (model / "loop").symlink_to("loop")
    held = await loaded(model)
    assert not await loaded_files.changed_in_sleep(held.files)
    (model / "config.json").write_text("{ }")
    assert await loaded_files.changed_in_sleep(held.files)


def rewritten(model: Path) -> None:
    (model / "deep" / "model.safetensors").write_bytes(b"87654321")


def moved_in(model: Path) -> None:
    other = model.parent / "other"
    other.write_text("{}")
    other.rename(model / "more.json")


def removed(model: Path) -> None:
    (model / "config.json").unlink()


def moved_away(model: Path) -> None:
    model.readlink().rename(model.parent / "old")


def pointed_elsewhere(model: Path) -> None:
    """The folder is a symlink, in whose place comes another."""
    (model.parent / "next").symlink_to(model.parent)
    (model.parent / "next").rename(model)


def exchanged_above(model: Path) -> None:
    """The folder in which the model's is, for another with a model of the same name."""
    other = model.parent.with_name("other")
    (other / model.name).mkdir(parents=True)
    model.parent.rename(model.parent.with_name("away"))
    other.rename(model.parent)


@pytest.mark.parametrize(
    "change", [rewritten, moved_in, removed, moved_away, pointed_elsewhere, exchanged_above]
)
async def test_request_that_comes_in_after_a_change_finds_the_model_outdated(
    model: Path,
    change: Callable[[Path], None],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel tells of it: no look is due for as long as the test may take."""
    linked = tmp_path_factory.mktemp("linked") / "model"
    linked.symlink_to(model)
    looks: list[bool] = []

    async def noted(loaded: LoadedFiles) -> bool:
        looks.append(await asyncio.to_thread(loaded_files.has_changed_now, loaded))
        return looks[-1]

    monkeypatch.setattr(loaded_files, "has_changed", noted)
    monkeypatch.setattr(watchdog, "LOOK_S", 600)
    held, outdated, loop = await loaded(linked), asyncio.Event(), asyncio.get_running_loop()
    watching = asyncio.ensure_future(
        watchdog.watch_files(held, lambda _: outdated.set(), lambda _, reason: None)
    )
    await eventually(lambda: looks)
    here, there = socket.socketpair()
    here.setblocking(False)
    with here, there, (model / "config.json").open():  # as an engine has it
        request = asyncio.ensure_future(loop.sock_recv(here, 1))
        await asyncio.sleep(0)
        change(linked)
        there.send(b"?")
        await request
        assert outdated.is_set() and looks == [False]
    await asyncio.wait_for(watching, 60)


async def test_change_is_found_by_a_look_where_the_kernel_tells_of_none(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where no inotify instance of the user is left, or another machine has changed it."""
    monkeypatch.setattr(file_events, "_libc", SimpleNamespace(inotify_init1=lambda flags: -1))
    monkeypatch.setattr(watchdog, "LOOK_S", 0.001)
    held, ends = await loaded(model), asyncio.Event()
    watching = asyncio.ensure_future(
        watchdog.watch_files(held, lambda _: None, lambda _, reason: ends.set())
    )
    await eventually(lambda: held.files.is_unwatched)  # so each request looks, too
    rewritten(model)
    await asyncio.wait_for(watching, 60)
    assert ends.is_set()


class Broken:
    """One way to look at files, which fails as a server of files does that is away."""

    def __init__(self, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_broken, real = True, getattr(Path, how)

        def looks(path: Path, *args: Any, **more: Any) -> Any:
            if self.is_broken:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return real(path, *args, **more)

        monkeypatch.setattr(Path, how, looks)


@pytest.mark.parametrize("how", ["stat", "rglob"])
async def test_failed_file_check_changes_nothing_and_the_watch_goes_on(
    model: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(watchdog, "LOOK_S", 0.001)
    held, found = await loaded(model), asyncio.Event()
    server = Broken(how, monkeypatch)
    assert not await loaded_files.has_changed(held.files)
    watching = asyncio.ensure_future(
        watchdog.watch_files(held, lambda _: found.set(), lambda _, reason: None)
    )
    (model / "config.json").write_text("{ }")
    assert not await loaded_files.has_changed(held.files) and not found.is_set()
    server.is_broken = False
    async with asyncio.timeout(60):
        await found.wait()
        await watching


async def test_unreadable_files_before_a_wake_do_not_count_as_changed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = await loaded(model)
    server = Broken("open", monkeypatch)
    assert not await loaded_files.changed_in_sleep(held.files)
    unread = await loaded(model)
    server.is_broken = False
    assert not await loaded_files.changed_in_sleep(unread.files) and unread.files.pieces == ""


async def test_watch_that_ends_by_a_bug_is_logged(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: object) -> None:
        raise KeyError("nobody thought of this")

    monkeypatch.setattr(watchdog, "watch_files", broken)
    task = start_watchdog(await loaded(model), lambda _: None, lambda _, reason: None)
    await asyncio.wait({task}, timeout=60)
    assert "nobody thought of this" in caplog.text


class TellsKept:
    """An engine that has evicted more each time that it is asked."""

    is_alive = True

    def __init__(self) -> None:
        self.asked = 0

    async def health(self) -> KeptKv:
        self.asked += 1
        if self.asked == 3:
            await asyncio.Event().wait()
        return KeptKv(10.0 * self.asked)


@pytest.mark.spec("G3")
async def test_replica_learns_what_its_engine_has_evicted_with_its_health(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "ASK_S", 0.0)
    held, engine = await loaded(model), TellsKept()
    link: Any = engine
    held.link = link
    watching = asyncio.ensure_future(watchdog.watch_engine(held, lambda *_: None))
    await eventually(lambda: engine.asked == 3)
    assert held.kept_kv == KeptKv(20.0)
    watching.cancel()


class HangsLater:
    """An engine of which one question fails for want of a connection, and the next has no end."""

    is_alive = True

    def __init__(self) -> None:
        self.asked = 0

    async def health(self) -> None:
        self.asked += 1
        if self.asked == 1:
            raise EngineLost("a", TicketId("a-1"))
        await asyncio.Event().wait()


@pytest.mark.spec("H9")
async def test_engine_that_hangs_after_a_failed_connection_is_ended(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "ASK_S", 0.0)
    monkeypatch.setattr(watchdog, "HUNG_S", 0.05)
    held, ends = await loaded(model), list[Reason]()
    engine: Any = HangsLater()
    held.link = engine
    watching = watchdog.watch_engine(held, lambda _, reason: ends.append(reason))
    await asyncio.wait_for(watching, 60)
    assert ends == [Reason.LOST] and engine.asked == 2
    engine.is_alive, engine.asked = False, 0
    await asyncio.wait_for(watchdog.watch_engine(held, lambda _, reason: ends.append(reason)), 60)
    assert ends == [Reason.LOST], "its lifeline tells of its end"


async def test_watch_goes_on_where_a_look_gets_no_thread(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = await loaded(model)
    with monkeypatch.context() as scarce:
        scarce.setattr(ThreadPoolExecutor, "submit", Mock(side_effect=RuntimeError("no thread")))
        assert not await loaded_files.has_changed(held.files)
    (model / "config.json").write_text("{ }")
    assert await loaded_files.has_changed(held.files)


@pytest.mark.spec("D5", "H9")
async def test_watch_that_begins_where_there_is_no_thread_goes_on(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "LOOK_S", 0.001)
    held, found = await loaded(model), asyncio.Event()
    with monkeypatch.context() as scarce:
        scarce.setattr(ThreadPoolExecutor, "submit", Mock(side_effect=RuntimeError("no thread")))
        watching = asyncio.ensure_future(
            watchdog.watch_files(held, lambda _: found.set(), lambda _, reason: None)
        )
        await eventually(lambda: held.files.is_unwatched or watching.done())
    (model / "config.json").write_text("{ }")
    await asyncio.wait_for(watching, 60)
    assert found.is_set()
