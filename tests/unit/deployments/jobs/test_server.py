"""JobsServer judges work by a table that is no older than the work."""

from pathlib import Path

import pytest

from deployments.config import boot
from deployments.front.inference.service import InferenceService
from deployments.jobs import server
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
