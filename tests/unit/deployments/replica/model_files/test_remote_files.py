"""Files that change without the kernel's knowledge are looked at before each request (D5)."""

import asyncio
import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from arbiter.core import events as ev
from arbiter.core.decisions import Reason, Tier
from arbiter.errors import LoadFailed
from deployments.config import model_content
from deployments.replica.held_model import HolderState
from deployments.replica.lifecycle import loading, resize
from deployments.replica.model_files import loaded_files, remote_files
from deployments.replica.model_files.remote_files import SharedLooks, fresh_stat, is_remote
from tests.support.few_threads import few_threads, is_free
from tests.support.scripted_growth import resident
from tests.support.scripted_holder import holder, revoke, until, use
from tests.support.waits import eventually

pytestmark = pytest.mark.spec("D5")


def test_local_folder_and_a_hub_id_are_not_remote(tmp_path: Path) -> None:
    assert not is_remote(str(tmp_path)) and not is_remote("org/model") and not is_remote("")


def test_fresh_look_says_what_a_look_says_and_fails_as_it_does(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    assert fresh_stat(tmp_path / "a") == (tmp_path / "a").stat()
    with pytest.raises(FileNotFoundError):
        fresh_stat(tmp_path / "b")


async def test_request_after_a_change_of_remote_files_loads_them_and_others_do_not_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Path] = []

    def noted(path: Path) -> os.stat_result:
        looked.append(path)
        return path.stat()

    monkeypatch.setattr(remote_files, "fresh_stat", noted)
    (tmp_path / "weights").write_bytes(b"old")
    async with holder() as (residency, arbiter, _):
        first = await use(residency)
        residency.models["a"].files = seen = await loaded_files.look(str(tmp_path))
        assert await use(residency) == first and not looked
        seen.is_unwatched = True
        assert await use(residency) == first and looked
        (tmp_path / "weights").write_bytes(b"new, and longer")
        assert await use(residency) != first
        await until(lambda: ev.Released(first, "replaced") in arbiter.told)


@pytest.mark.spec("A12")
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES, errno.ETIMEDOUT])
async def test_load_whose_files_cannot_be_looked_at_is_a_failed_load_to_the_arbiter(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    async def look(model: str) -> loaded_files.LoadedFiles:
        raise OSError(number, os.strerror(number), "/models/a")

    monkeypatch.setattr(loaded_files, "look", look)
    async with holder() as (residency, arbiter, _):
        with pytest.raises(LoadFailed, match="/models/a"):
            await use(residency)
        [broke] = [event for event in arbiter.told if isinstance(event, ev.LoadBroke)]
        assert (broke.ticket, broke.out_of_memory) == (arbiter.asked[0], False)
        assert os.strerror(number) in broke.cause


@pytest.mark.spec("A14")
async def test_growth_whose_files_cannot_be_looked_at_is_a_failed_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def look(model: str) -> loaded_files.LoadedFiles:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "/models/a")

    async with resident() as (residency, growth, _):
        monkeypatch.setattr(loaded_files, "look", look)
        with pytest.raises(LoadFailed, match="/models/a"):
            await resize.grow(residency, "a")
        assert not growth.spawned and not residency.held_tickets()


@pytest.mark.spec("A18")
async def test_models_whose_file_server_hangs_delay_no_look_at_another_and_no_call_of_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, seen, begun = threading.Event(), model_content.files, []

    def files(model: str) -> model_content.Files:
        begun.append(model)
        assert not model.startswith("/away") or may_end.wait(60)
        return seen(model)

    monkeypatch.setattr(loaded_files, "files", files)
    (tmp_path / "weights").write_bytes(b"here")
    with few_threads():
        away = [asyncio.ensure_future(loaded_files.look(f"/away/{n}")) for n in range(6)]
        try:
            await eventually(lambda: len(begun) == 6)
            assert (await asyncio.wait_for(loaded_files.look(str(tmp_path)), 60)).rows
            assert await is_free()
        finally:
            may_end.set()
            await asyncio.gather(*away)


class Look:
    """Of which a test says when it ends."""

    def __init__(self) -> None:
        self.may_end, self.begun = threading.Event(), 0

    def __call__(self) -> bool:
        self.begun += 1
        assert self.may_end.wait(60)
        return True


async def test_requests_share_a_look_that_began_after_they_came() -> None:
    looks, look = SharedLooks(), Look()
    first = asyncio.ensure_future(looks.ask("m", look))
    await eventually(lambda: look.begun == 1)
    later = [asyncio.ensure_future(looks.ask("m", look)) for _ in range(9)]
    await asyncio.sleep(0)
    look.may_end.set()
    assert await asyncio.gather(first, *later) == [True] * 10
    assert look.begun == 2


async def test_requests_go_on_where_the_server_of_the_files_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_files, "LOOK_MOST_S", 0.01)
    looks, look = SharedLooks(), Look()
    assert [await looks.ask("m", look) for _ in range(3)] == [False] * 3
    assert look.begun == 1, "no more threads than one wait for it"
    look.may_end.set()
    monkeypatch.setattr(remote_files, "LOOK_MOST_S", 60)
    assert await looks.ask("m", look)


async def test_requests_and_drains_go_on_where_a_look_gets_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with holder() as (residency, arbiter, _):
        ticket = await use(residency)
        residency.models["a"].files = seen = await loaded_files.look(str(tmp_path))
        seen.is_unwatched = True
        submit = Mock(side_effect=RuntimeError("no thread"))
        monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
        async with residency.use("a"):
            revoke(residency, Reason.SWAP, barrier_s=0.01)
            await until(lambda: "BarrierDropped" in arbiter.kinds())
            assert await use(residency) == ticket, "the request that waited at the barrier"
        assert submit.call_count and "Released" not in arbiter.kinds()


@pytest.mark.spec("A12", "D1")
async def test_wake_whose_files_cannot_be_looked_at_is_a_failed_load_to_the_arbiter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def changed(_: object) -> bool:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), "/models/a")

    async with holder() as (residency, arbiter, _):
        ticket = await use(residency)
        revoke(residency, Reason.SWAP, Tier.ASLEEP)
        await until(lambda: residency.models["a"].state is HolderState.ASLEEP)
        monkeypatch.setattr(loading, "files_changed_during_load", changed)
        with pytest.raises(LoadFailed, match="/models/a"):
            await use(residency)
        [broke] = [event for event in arbiter.told if isinstance(event, ev.LoadBroke)]
        assert broke.ticket == ticket
