"""`arbiter plan MODEL`: what a load would bring about. Nothing changes."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import typer
from rich.console import RenderableType

from deployments.cli.http import Url, front
from deployments.cli.output import AsJson, cell, show, size, sizes, span, table

ANSWERS = {
    "now": "now",
    "after_evicting": "after evicting",
    "not_before": "not before",
    "never": "never",
}


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A model of the table. With --gb: a name for what would ask.", show_default=False
        ),
    ] = "",
    gb: Annotated[
        float | None, typer.Option(help="GiB for something that is in no table, as a lease asks.")
    ] = None,
    priority: Annotated[
        Literal["urgent", "high", "normal", "low", "batch"],
        typer.Option(metavar="PRIORITY", help="urgent, high, normal, low or batch."),
    ] = "normal",
    node: Annotated[
        str | None, typer.Option(help="The node, from `arbiter status`, if there are several.")
    ] = None,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Say what loading a model would bring about: now, after which evictions, not before, never.

    Nothing is loaded and nothing leaves.
    """
    if not model and gb is None:
        raise typer.BadParameter("name a model, or say how many --gb")
    if gb is not None and not math.isfinite(gb):
        raise typer.BadParameter(f"--gb {gb} is no number of GiB")
    body = {"model": model, "gb": gb, "priority": priority, "node": node}
    with front(url) as f:
        reply = f.send("POST", "/arbiter/plan", {k: v for k, v in body.items() if v is not None})
    show(as_json, reply, *lines(reply))


def lines(reply: dict[str, Any]) -> Iterator[RenderableType]:
    """A plan for a person: the answer, who would leave, and why."""
    yield cell(_headline(reply))
    if reply["victims"]:
        yield ""
        yield _victims(reply["victims"])
        return
    for sentence in reply["sentences"]:
        yield cell(sentence)


def _headline(reply: dict[str, Any]) -> str:
    words = [f"{reply['model']} ({size(reply['need_bytes'])}): {ANSWERS[reply['answer']]}"]
    if reply["answer"] == "after_evicting":
        words.append(f"{len(reply['victims'])} of the loaded models")
        if reply["goes_to_bytes"]:
            words.append(f"on {', '.join(reply['goes_to_bytes'])}")
    if reply["answer"] == "not_before":
        has_wait = reply["wait_s"] is not None
        words.append(f"{span(reply['wait_s'])} from now" if has_wait else "a time that can be told")
    if reply["load_s"]:
        words.append(f"and a load of {span(reply['load_s'])}")
    if reply["starts_replica"]:
        words.append("once its replica has started")
    return " ".join(words)


def _victims(victims: list[dict[str, Any]]) -> RenderableType:
    rows = [
        (
            v["model"],
            v["ticket"],
            sizes(v["freed_bytes"]),
            v["goes"],
            span(v["reload_s"]) if v["reload_s"] else None,
            v["inflight"],
            span(v["idle_s"]),
            v["client"] or v["tenant"],
        )
        for v in victims
    ]
    heads = ("model", "ticket", "frees", "goes", "back in", "in flight", "idle", "used by")
    return table(heads, rows, numbers=("back in", "in flight", "idle"))
