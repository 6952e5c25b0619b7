"""Rows for the operator, of batches and jobs alike: counts, times and models. Messages of errors
are left out: they may repeat what a request says."""

from typing import Any

from deployments.jobs.batch_store import Batch
from deployments.jobs.store import Job


def batch(one: Batch) -> dict[str, Any]:
    """A batch."""
    ended_s = next((one.times[s] for s in (one.state.value, one.outcome) if s in one.times), None)
    return {
        "id": one.id,
        "kind": "batch",
        "tenant": one.tenant,
        "path": one.endpoint,
        "models": [served for _, served in one.models],
        "state": one.state.value,
        "done": one.completed,
        "failed": one.failed,
        "total": one.total,
        "created_s": one.created_s,
        "ended_s": ended_s,
        "expires_s": one.deadline_s,
        "errors": [{"code": error["code"], "line": error["line"]} for error in one.errors],
    }


def job(one: Job) -> dict[str, Any]:
    """A single job; its total is 1."""
    return {
        "id": one.id,
        "kind": one.kind,
        "tenant": one.tenant,
        "path": one.path,
        "models": [one.model],
        "state": one.state.value,
        "done": int(one.state == "completed"),
        "failed": int(one.state == "failed"),
        "total": 1,
        "position": one.position,
        "events": one.event_count,
        "attempts": one.attempts,
        "created_s": one.created_s,
        "ended_s": one.ended_s,
        "expires_s": one.deadline_s,
        "errors": [{"code": one.error.get("code"), "line": None}] if one.error else [],
    }
