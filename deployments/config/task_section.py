"""The `tasks` section of the table (J5): a task is a name with a ladder of models for it."""

import re
from typing import Any

from pydantic import Field, field_validator

from arbiter.units import LONGEST_S
from deployments.config.adapter_names import base_of
from deployments.config.fields import Strict

PREFIX = "task:"  # of a task's name where a request names a model

# A task's name stands in URLs, log lines and the names of models; a `/` or `:` would split it.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LONGEST_LADDER = 16  # each rung is looked at for each request
MOST_TASKS = 256


class TaskConfig(Strict):
    """One task. The order of its ladder is the order of preference."""

    # Models of the table, adapters as `base:adapter`, or remotes; the first is the primary
    ladder: tuple[str, ...] = Field(min_length=1, max_length=LONGEST_LADDER)
    pin_primary: bool = False  # the primary first, even if it must be loaded
    # A rung further down goes first where it serves sooner by more than this, for each place
    step_s: float = Field(1.0, ge=0, le=LONGEST_S)
    # For how long the model that answered does not count as idle, before its own keep-warm
    keep_warm_s: float = Field(0.0, ge=0, le=LONGEST_S)
    # In which an answer should be complete, its load included; absent: however long it takes
    budget_s: float | None = Field(None, gt=0, le=LONGEST_S)
    allow_cloud_fallback: bool = True  # false: no remote but the primary

    @field_validator("ladder")
    @classmethod
    def _told_apart(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if value.count(name) > 1:
                raise ValueError(f"{name!r} stands in it twice")
            if name.startswith(PREFIX):
                raise ValueError(f"{name!r} is a task; a ladder has models")
        return value


def named(tasks: dict[str, Any]) -> dict[str, Any]:
    """The tasks, if their names are names. Raises ValueError."""
    if len(tasks) > MOST_TASKS:
        raise ValueError(f"{len(tasks)} tasks, of at most {MOST_TASKS}")
    for name in tasks:
        if not _NAME.fullmatch(name):
            raise ValueError(f"task name {name!r}: use letters, digits, and . _ - inside")
    return tasks


def check_ladders(
    tasks: dict[str, TaskConfig], models: dict[str, str], remotes: dict[str, str]
) -> None:
    """Raises ValueError naming the first rung that is no model of these by name, here or remote,
    nor an adapter of one here."""
    for task, config in tasks.items():
        for name in config.ladder:
            if name not in remotes and base_of(name) not in models:
                names = ", ".join(sorted({*models, *remotes}))
                raise ValueError(f"tasks.{task}.ladder: no model {name!r}; there is: {names}")
