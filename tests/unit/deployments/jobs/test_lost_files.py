"""A batch whose files are lost fails and says so, wherever it needs them."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path

import pytest

from arbiter.errors import NeverFits
from arbiter.units import Bytes, TicketId
from deployments.jobs import batch_runner, calls
from deployments.jobs.batch_store import Batch, NewBatch
from deployments.jobs.bodies import Bodies
from deployments.jobs.errors import BodyLost, StorageFailed
from deployments.jobs.service import JobsService
from tests.support.jobs import (
    CHAT,
    Capability,
    begin,
    ended,
    jobs_service,
    line,
    results,
    upload,
)
from tests.support.waits import eventually

pytestmark = pytest.mark.spec("J4")


@pytest.fixture
def capability() -> Capability:
    made = Capability()
    made.gate.clear()
    return made


@pytest.fixture
async def service(
    tmp_path: Path, capability: Capability, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[JobsService]:
    monkeypatch.setattr(calls, "AGAIN_LEAST_S", 0.01)
    monkeypatch.setattr(batch_runner, "SWEEP_S", 0.05)
    made = jobs_service(tmp_path, capability)
    made.config = made.config.model_copy(update={"in_flight": 1})
    yield made
    await made.close()


def check_failed(batch: Batch) -> None:
    plain = batch.plain
    assert plain["status"] == "failed" and plain["failed_at"]
    [error] = plain["errors"]["data"]
    assert (error["code"], error["param"]) == ("input_file_lost", "input_file_id")
    assert f"file-{batch.id}" in error["message"] and "upload it again" in error["message"]


def input_of(folder: Path) -> Path:
    return Bodies(folder / "jobs").path("file-batch_a")


async def test_batch_whose_input_is_gone_before_its_validation_fails(
    tmp_path: Path, service: JobsService, capability: Capability
) -> None:
    await upload(service, [line("a")], "file-batch_a")
    input_of(tmp_path).unlink()
    names = "file-batch_a", "1h", 3_600.0, "file-out", "file-err"
    await service.create_batch(NewBatch("batch_a", "t", CHAT, *names))
    check_failed(await ended(service))
    assert not capability.calls


def gone(file: Path) -> None:
    file.unlink()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:250])


def overwritten(file: Path) -> None:
    file.write_bytes(b"?" * file.stat().st_size)


@pytest.mark.parametrize("lose", [gone, cut, overwritten])
async def test_batch_that_loses_its_input_fails_with_the_results_that_it_has(
    tmp_path: Path,
    service: JobsService,
    capability: Capability,
    lose: Callable[[Path], None],
) -> None:
    await begin(service, [line(f"r{number}") for number in range(5)])
    await eventually(lambda: capability.at_gate)
    lose(input_of(tmp_path))
    capability.gate.set()
    batch = await ended(service)
    check_failed(batch)
    assert batch.plain["request_counts"] == {"total": 5, "completed": 1, "failed": 0}
    found = await results(service, batch.plain["output_file_id"])
    assert [row["custom_id"] for row in found] == ["r0"]
    await begin(service, [line("z")], "batch_b")
    assert (await ended(service, "batch_b")).state == "completed", "others go on"


async def test_batch_that_expires_without_its_input_comes_to_its_end(
    tmp_path: Path, service: JobsService, capability: Capability
) -> None:
    await begin(service, [line("a")])
    await eventually(lambda: capability.at_gate)
    input_of(tmp_path).unlink()
    with closing(sqlite3.connect(tmp_path / "arbiter.sqlite")) as db, db:
        db.execute("UPDATE batches SET deadline_s = 0")  # its window is over
    check_failed(await ended(service))


async def test_batch_that_loses_its_results_fails_and_keeps_no_other_from_its_own(
    tmp_path: Path, service: JobsService, capability: Capability
) -> None:
    capability.gate.set()
    capability.memory["two"] = asyncio.Event()
    capability.refusals = [NeverFits(TicketId("t"), Bytes(2), Bytes(1))]
    await begin(service, [line("refused"), line("answered"), line("later", "two")])
    output, errors = (Bodies(tmp_path / "jobs").path(f"file-batch_a-{n}") for n in ("out", "err"))
    await eventually(lambda: output.exists() and errors.exists())
    await begin(service, [line("z", "two")], "batch_b")
    output.unlink()
    capability.memory["two"].set()
    plain = (await ended(service)).plain
    [error] = plain["errors"]["data"]
    assert (plain["status"], error["code"]) == ("failed", "output_file_lost")
    assert plain["output_file_id"] is None, "it is not whole"
    [kept] = await results(service, plain["error_file_id"])
    assert kept["custom_id"] == "refused"
    assert (await ended(service, "batch_b")).state == "completed"


def test_body_of_a_folder_that_is_away_is_not_lost(tmp_path: Path) -> None:
    bodies = Bodies(tmp_path / "jobs")
    with pytest.raises(BodyLost):
        bodies.read("file-a")
    bodies.folder.rmdir()
    with pytest.raises(StorageFailed) as failed:
        bodies.read("file-a")
    assert not isinstance(failed.value, BodyLost)
