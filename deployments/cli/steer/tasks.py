"""`arbiter task add|list|remove`: names with a ladder of models, changed while all runs."""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from deployments.cli.http import Url, check_json, front
from deployments.cli.output import AsJson, CommandError, cell, show, span, table

app = typer.Typer(no_args_is_help=True, help="Tasks: names with a ladder of models.")

CONFIG = "/api/v1/config"
Tasks = dict[str, Any]
Name = Annotated[str, typer.Argument(help="Requests name it as task:NAME.")]


@app.command()
def add(
    name: Name,
    ladder: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="The primary first, then its stand-ins.")
    ],
    pin_primary: Annotated[
        bool,
        typer.Option(
            "--pin-primary",
            help="Ask the primary first, even if it must be loaded and a stand-in is resident.",
        ),
    ] = False,
    budget_s: Annotated[
        float | None, typer.Option(help="Seconds in which an answer should be complete.")
    ] = None,
    keep_warm_s: Annotated[
        float, typer.Option(help="Seconds before the model that answered counts as idle.")
    ] = 0.0,
    step_s: Annotated[
        float, typer.Option(help="Seconds of waiting that one place in the ladder is worth.")
    ] = 1.0,
    local: Annotated[
        bool, typer.Option("--local", help="Use no remote, unless it is the primary.")
    ] = False,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Make a task, or put another in its place; effective immediately."""
    row = {
        "ladder": ladder,
        "pin_primary": pin_primary,
        "budget_s": budget_s,
        "keep_warm_s": keep_warm_s,
        "step_s": step_s,
        "allow_cloud_fallback": not local,
    }
    for key, value in row.items():
        check_json(f"`{key}`", value)
    tasks_now = _changed(url, lambda tasks: tasks | {name: row})
    show(as_json, tasks_now[name], cell(f"task:{name} asks {', '.join(ladder)}"))


@app.command("list")
def list_(as_json: AsJson = False, url: Url = None) -> None:
    """Every task with its ladder."""
    with front(url) as f:
        tasks: Tasks = f.get(CONFIG)["tasks"]
    rows = [
        (
            name,
            ", ".join(row["ladder"]),
            row["pin_primary"],
            span(row["budget_s"]),
            span(row["keep_warm_s"]),
            row["allow_cloud_fallback"],
        )
        for name, row in tasks.items()
    ]
    heads = ("task", "ladder", "pinned", "budget", "keep warm", "cloud")
    show(as_json, tasks, table(heads, rows, numbers=heads[3:5]))


@app.command()
def remove(name: Name, as_json: AsJson = False, url: Url = None) -> None:
    """Take a task away; effective immediately."""

    def without(tasks: Tasks) -> Tasks:
        if name not in tasks:
            names = ", ".join(tasks) or "none"
            raise CommandError(f"no task {name!r}; there is: {names}")
        return {task: row for task, row in tasks.items() if task != name}

    _changed(url, without)
    show(as_json, {"removed": name}, cell(f"removed task:{name}"))


def _changed(url: str | None, change: Callable[[Tasks], Tasks]) -> Tasks:
    """All tasks after a change of those that were read; refused where another came in between."""
    with front(url) as f:
        config = f.get(CONFIG)
        body = {"generation": config["generation"], "tasks": change(config["tasks"])}
        tasks: Tasks = f.send("PUT", CONFIG, body)["tasks"]
    return tasks
