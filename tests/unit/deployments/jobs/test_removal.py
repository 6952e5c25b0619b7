"""Jobs, batches and files of a removed tenant leave, whatever they are at, and no other's."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deployments.jobs import removal
from deployments.jobs import service as jobs
from deployments.jobs.bodies import folder_of
from deployments.jobs.errors import NotFound
from deployments.jobs.service import JobsService
from deployments.jobs.store import JobState, NewJob
from tests.support.jobs import CHAT, Capability, begin, chat, ended, jobs_service, line, upload
from tests.support.waits import eventually

pytestmark = pytest.mark.spec("J4", "E6")
REMOVED, OTHER = "t", "u"


@pytest.fixture
def capability() -> Capability:
    return Capability()


@pytest.fixture
async def service(tmp_path: Path, capability: Capability) -> AsyncIterator[JobsService]:
    made = jobs_service(tmp_path, capability)
    yield made
    await made.close()


async def create(service: JobsService, job_id: str, tenant: str) -> None:
    new = NewJob(job_id, tenant, "async", CHAT, "one")
    await service.create(new, json.dumps(chat(job_id)).encode())


async def is_finished(service: JobsService, job_id: str, tenant: str) -> bool:
    return (await service.get(tenant, job_id)).state.is_finished


def bodies(folder: Path) -> set[str]:
    return {path.name for path in folder_of(folder / "arbiter.sqlite").iterdir()}


async def test_all_of_a_tenant_leaves_while_it_runs_and_another_keeps_its_own(
    tmp_path: Path, service: JobsService, capability: Capability
) -> None:
    for name, tenant in (("mine", REMOVED), ("other", OTHER)):
        await create(service, name, tenant)
        await eventually(lambda n=name, t=tenant: is_finished(service, n, t))  # type: ignore[misc]
    await begin(service, [line("r1")], "batch_done")
    await ended(service, "batch_done")
    kept = {name for name in bodies(tmp_path) if name.startswith("other")}
    capability.gate.clear()
    await create(service, "runs", REMOVED)
    await begin(service, [line(f"r{n}") for n in range(30)], "batch_runs")
    await upload(service, [line("r1")], "file-alone")
    await eventually(lambda: capability.at_once > 1)
    assert await service.remove_tenant(REMOVED) == 0
    assert capability.at_once == 0 and capability.cancelled_count > 1
    for batch in ("batch_done", "batch_runs"):
        with pytest.raises(NotFound):
            await service.batch(REMOVED, batch)
    assert await service.page(REMOVED, None, "", 20) == []
    assert bodies(tmp_path) == kept
    assert (await service.get(OTHER, "other")).state == JobState.COMPLETED
    capability.gate.set()
    await create(service, "later", REMOVED)  # what it begins after it is kept again
    await eventually(lambda: is_finished(service, "later", REMOVED))


async def test_removal_goes_on_in_the_next_process(tmp_path: Path, service: JobsService) -> None:
    """The first died as soon as it had written it down."""
    await begin(service, [line("r1")], "batch_done")
    await ended(service, "batch_done")
    await service._blocking(removal.end_all, service._db, REMOVED)
    assert bodies(tmp_path)
    heir = jobs_service(tmp_path, Capability())
    try:
        await eventually(lambda: not bodies(tmp_path))
    finally:
        await heir.close()


async def test_work_that_does_not_end_in_time_is_counted_and_erased_later(
    tmp_path: Path,
    service: JobsService,
    capability: Capability,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs, "REMOVED_WITHIN_S", 0.0)
    capability.gate.clear()
    await create(service, "runs", REMOVED)
    await eventually(lambda: capability.at_once)
    assert await service.remove_tenant(REMOVED) == 1
    async with asyncio.timeout(60):
        await eventually(lambda: not bodies(tmp_path))
