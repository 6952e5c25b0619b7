"""What readiness learns from Serve."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from deployments.front.status import serve_status
from deployments.front.status.serve_status import CAUSE_CHARS, Applications
from tests.support.waits import WITHIN_S


def overview(status: str, message: str = "") -> ApplicationStatusOverview:
    return ApplicationStatusOverview(ApplicationStatus[status], message, 0.0, {})


@pytest.mark.spec("J9")
@pytest.mark.parametrize(
    ("status", "has_failed"),
    [
        ("RUNNING", False), ("DEPLOYING", False), ("NOT_STARTED", False), ("DELETING", False),
        ("DEPLOY_FAILED", True), ("UNHEALTHY", True),
    ],
)  # fmt: skip
async def test_failed_application_is_named_with_its_cause(status: str, has_failed: bool) -> None:
    applications = Applications(lambda: {"chat": overview(status, "no such module")})
    failures = await applications.failures(["chat"])
    assert ("no such module" in failures.get("chat", "")) == has_failed


async def test_missing_application_has_failed() -> None:
    assert "no application" in (await Applications(dict).failures(["chat"]))["chat"]


async def test_long_cause_keeps_its_end() -> None:
    long = Applications(lambda: {"chat": overview("DEPLOY_FAILED", "x" * 9_000 + "ValueError")})
    cause = (await long.failures(["chat"]))["chat"]
    assert cause.endswith("ValueError") and len(cause) < 2 * CAUSE_CHARS


async def test_status_is_asked_for_once_by_many_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def ask() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        return {"chat": overview("RUNNING")}

    applications, now_s = Applications(ask), 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    await asyncio.gather(*(applications.failures(["chat"]) for _ in range(9)))
    assert asked == 1
    now_s += 1.5
    await applications.failures(["chat"])
    assert asked == 2


async def test_controller_that_does_not_answer_is_no_failure() -> None:
    def ask() -> dict[str, Any]:
        raise ActorUnavailableError("the controller restarts", None)

    assert await Applications(ask).failures(["chat"]) == {}


@pytest.mark.spec("J9")
async def test_controller_that_hangs_takes_no_thread_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve_status, "WAIT_S", 0.01)
    monkeypatch.setattr(serve_status, "FRESH_S", 0.0)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    answers = threading.Event()

    def ask() -> dict[str, Any]:
        answers.wait(WITHIN_S)
        return {"chat": overview("UNHEALTHY", "out of memory")}

    applications = Applications(ask)
    try:
        for _ in range(3):
            assert await applications.failures(["chat"]) == {}
        async with asyncio.timeout(WITHIN_S / 4):
            assert await asyncio.to_thread(threading.get_ident)
    finally:
        answers.set()
    monkeypatch.setattr(serve_status, "WAIT_S", WITHIN_S)
    assert "out of memory" in (await applications.failures(["chat"]))["chat"]
