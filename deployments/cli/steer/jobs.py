"""`arbiter jobs list|show|cancel|tail`: batches and single jobs of all tenants, without the texts
of their requests and answers."""

import time
from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import RenderableType
from rich.text import Text

from deployments.cli.http import Absence, NoFront, NotTheFront, Refused, Url, front
from deployments.cli.output import AsJson, cell, clean, show, show_line, span, table

app = typer.Typer(no_args_is_help=True, help="Batches and jobs: list, show, cancel, follow.")

JobId = Annotated[
    str, typer.Argument(metavar="ID", help="The id of a batch or job, from `arbiter jobs list`.")
]
TAIL_S = 1.0  # between two looks
ENDED = ("completed", "failed", "cancelled", "expired")


@app.command("list")
def list_(
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="How many, at most.")] = 50,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Batches and jobs of all tenants, the newest first."""
    with front(url) as f:
        page = f.get(f"/arbiter/jobs?limit={limit}")
    heads = ("id", "state", "done", "failed", "of", "tenant", "path", "models", "since")
    now = time.time()
    rows = [
        (
            *(row["id"], row["state"], row["done"], row["failed"], row["total"], row["tenant"]),
            *(row["path"], ", ".join(row["models"]), span(now - row["created_s"])),
        )
        for row in page["jobs"]
    ]
    show(as_json, page, table(heads, rows, numbers=("done", "failed", "of")))


@app.command("show")
def show_(job_id: JobId, as_json: AsJson = False, url: Url = None) -> None:
    """State, counts and errors of one batch or job."""
    with front(url) as f:
        job = f.get(_path(job_id))
    show(as_json, job, *_lines(job))


@app.command()
def cancel(job_id: JobId, as_json: AsJson = False, url: Url = None) -> None:
    """End a batch or job. The results it has so far stay."""
    with front(url) as f:
        cancelled = f.send("DELETE", _path(job_id))
    show(as_json, cancelled, *_lines(cancelled))


@app.command()
def tail(job_id: JobId, as_json: AsJson = False, url: Url = None) -> None:
    """Follow a batch or job until it has ended, also where the front restarts meanwhile. The exit
    status is 1 if it did not complete."""
    before, absence = None, Absence()
    with front(url) as f:
        while True:
            try:
                job = f.get(_path(job_id))
            except (NoFront, NotTheFront, Refused) as error:
                if absence.waited(error):
                    continue
                raise
            absence.end()
            if (now := _summary(job)) != before:
                show_line(as_json, job, Text(clean(now)))
                before = now
            if job["state"] in ENDED:
                raise typer.Exit(int(job["state"] != "completed"))
            time.sleep(TAIL_S)


def _path(job_id: str) -> str:
    return f"/arbiter/jobs/{quote(job_id, safe='')}"


def _lines(row: dict[str, Any]) -> Iterator[RenderableType]:
    yield cell(_summary(row))
    models = ", ".join(row["models"]) or "not known yet"
    yield cell(f"{row['kind']} of tenant {row['tenant']} for {row['path']}, models: {models}")
    for error in row["errors"]:
        where = f"line {error['line']}: " if error.get("line") else ""
        yield cell(f"{where}{error['code']}")


def _summary(row: dict[str, Any]) -> str:
    counts = f"{row['done']} done and {row['failed']} failed of {row['total']}"
    return f"{row['id']} is {row['state']}, {counts}"
