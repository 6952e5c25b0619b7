"""A batch while its input file is checked: what ends it, and what it costs others."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from deployments.adapters.safe_files import AdaptersAway
from deployments.jobs import batch_runner, validation
from deployments.jobs.batch_store import Line
from deployments.jobs.service import JobsService
from tests.support.jobs import Capability, begin, ended, jobs_service, line


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[JobsService]:
    made = jobs_service(tmp_path, Capability())
    yield made
    await made.close()


@pytest.mark.spec("J4")
async def test_batch_that_expires_before_it_began_counts_no_line(
    service: JobsService, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    target = validation.target

    async def away_at_the_third(*call: Any) -> tuple[str, str]:
        nonlocal looks
        looks += 1
        if looks % 3 == 0:
            raise AdaptersAway("one", "the folder was not read")
        return await target(*call)

    monkeypatch.setattr(AdaptersAway, "retry_after_s", 0.01)
    monkeypatch.setattr(validation, "target", away_at_the_third)
    monkeypatch.setattr(batch_runner, "CHUNK", 1)
    monkeypatch.setattr(batch_runner, "SWEEP_S", 0.05)
    await begin(service, [line(name) for name in "abcd"], window_s=0.3)
    plain = (await ended(service)).plain
    assert looks >= 3 and plain["status"] == "expired"
    assert plain["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    assert plain["error_file_id"] is None


@pytest.mark.spec("J4", "L3")
async def test_validation_that_a_bug_ends_is_tried_again_but_not_at_once(
    service: JobsService, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[float] = []
    target = validation.target

    async def fails_twice(*call: Any) -> tuple[str, str]:
        tries.append(time.monotonic())
        if len(tries) < 3:
            raise ZeroDivisionError("a bug")
        return await target(*call)

    monkeypatch.setattr(validation, "target", fails_twice)
    monkeypatch.setattr(batch_runner, "FAILED_AGAIN_S", 0.2)
    await begin(service, [line("a")])
    assert (await ended(service)).plain["request_counts"]["completed"] == 1
    assert len(tries) == 3 and tries[-1] - tries[0] >= 0.4


@pytest.mark.spec("J4", "L3")
async def test_file_of_blank_lines_leaves_room_for_other_work(
    service: JobsService, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = 0
    turns_at: list[int] = []  # by line

    class Counting(validation.Validator):
        async def check(self, offset: int, raw: bytes) -> Line | None:
            turns_at.append(turns)
            return await super().check(offset, raw)

    async def other_work() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    monkeypatch.setattr(validation, "Validator", Counting)
    other = asyncio.create_task(other_work())
    await begin(service, [line("a"), *[""] * 10_000, line("b")])
    assert (await ended(service)).plain["request_counts"]["completed"] == 2
    other.cancel()
    assert len(turns_at) == 10_002
    assert turns_at[-1] - turns_at[0] >= 10_000 // batch_runner.YIELD_EVERY
