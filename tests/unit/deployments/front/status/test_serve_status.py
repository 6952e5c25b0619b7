"""What readiness learns from Serve."""

import asyncio
import time
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from deployments.front.status.serve_status import CAUSE_CHARS, Applications


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
