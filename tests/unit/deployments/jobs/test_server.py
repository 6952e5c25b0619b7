"""JobsServer judges work by a table that is no older than the work, and outlives a bad disk."""

from pathlib import Path

import pytest

from deployments.config import boot
from deployments.front.inference.service import InferenceService
from deployments.jobs import server
from deployments.jobs.errors import StorageFailed
from deployments.jobs.server import JobsServer
from tests.support.jobs import Capability, begin, ended, line, table
from tests.support.waits import eventually


@pytest.mark.spec("J4")
async def test_batch_may_name_a_model_that_is_as_new_as_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = boot.as_plain(table(one="x"))
    asked: list[str] = []

    async def call_arbiter(method: str) -> object:
        asked.append(method)
        return plain

    monkeypatch.setattr(server, "call_arbiter", call_arbiter)
    inference = InferenceService(lambda name: Capability().send)
    monkeypatch.setattr(server, "InferenceService", lambda: inference)
    jobs = JobsServer(str(tmp_path / "arbiter.sqlite"))
    try:
        await eventually(lambda: asked)
        plain = boot.as_plain(table(one="x", two="x"))
        await begin(jobs, [line("r1", "two")])
        assert (await ended(jobs)).state == "completed"
        assert (await jobs.answer("batch", "t", "batch_a")).state == "completed"
    finally:
        await jobs.close()


@pytest.mark.spec("J4", "L3")
async def test_replica_on_a_bad_disk_says_so_and_works_once_the_disk_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def call_arbiter(method: str) -> object:
        return boot.as_plain(table())

    monkeypatch.setattr(server, "call_arbiter", call_arbiter)
    inference = InferenceService(lambda name: Capability().send)
    monkeypatch.setattr(server, "InferenceService", lambda: inference)
    in_its_place = tmp_path / "arbiter.sqlite"
    in_its_place.mkdir()  # as a file system that is not mounted: the file cannot be opened
    jobs = JobsServer(str(in_its_place))
    try:
        for _ in range(2):
            await jobs.check_health()
            with pytest.raises(StorageFailed):
                await jobs.answer("page", "t")
        in_its_place.rmdir()
        await jobs.check_health()
        assert await jobs.answer("page", "t") == []
        await begin(jobs, [line("r1")])
        assert (await ended(jobs)).state == "completed"
    finally:
        await jobs.close()
