"""`arbiter free --gb 8`: device memory for a person, at once; the models return after it.

Idle models leave whatever their minimum residency; what is pinned or in use stays, and is named.
The memory is held while a command runs, or for a term.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from arbiter import leases
from arbiter.errors import RequestError
from arbiter.leases import LeaseLost
from deployments.cli import plan
from deployments.cli.http import Url, address, api_key, front
from deployments.cli.lease import run_command
from deployments.cli.output import AsJson, CommandError, cell, show, sizes, table, working

WITHIN_S = 25.0  # less than a command waits for an answer (http.ANSWER_S); a barrier lasts 10 s
_TERM = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def _term(text: str) -> str:
    if not (match := _TERM.fullmatch(text.strip())):
        raise typer.BadParameter(f"{text!r} is not a time; write 90s, 30m, 2h or seconds")
    return str(float(match[1]) * _SECONDS[match[2]])


def free(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND]", help="After `--`.")
    ] = None,
    gb: Annotated[float, typer.Option(help="GiB to free on one device.")] = 0.0,
    term_text: Annotated[
        str, typer.Option("--for", metavar="TIME", callback=_term, help="90s, 30m, 2h.")
    ] = "1h",
    name: Annotated[str, typer.Option(help="What people see.")] = "free",
    node: Annotated[
        str | None, typer.Option(help="Of several, as `arbiter status` has it.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would leave and what stays, no more.")
    ] = False,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Free device memory at once, and hold it: while COMMAND runs, else for a term.

    Pinned models and models in use stay. What left is loaded again afterwards.
    """
    if gb <= 0:
        raise typer.BadParameter("say how much by --gb")
    body: dict[str, Any] = {
        "gb": gb, "term_s": float(term_text), "name": name, "node": node, "kept": not words,
        "notice_s": 10.0, "within_s": WITHIN_S, "dry_run": dry_run,
    }  # fmt: skip
    with front(url) as f, working(f"freeing {gb:g} GiB"):
        done = f.send("POST", "/arbiter/free", {k: v for k, v in body.items() if v is not None})
    if dry_run or not words:
        return show(as_json, done, *_lines(done))
    where = address(url)
    held = leases.ask(
        gb, name=name, node=node, term_s=float(term_text), notice_s=10.0,
        way=leases.HttpTransport(where, api_key(where)),
    )  # fmt: skip
    held.id = done["id"]
    try:
        code = run_command(words, held.acquire(), as_json)
    except (RequestError, LeaseLost, OSError) as error:
        raise CommandError(str(error)) from error
    raise typer.Exit(code)


def _lines(done: dict[str, Any]) -> Iterator[RenderableType]:
    lease, made = done["lease"], done["plan"]
    if lease is None:
        yield from plan.lines(made)
    else:
        yield cell(f"{lease['ticket']} holds {sizes(lease['devices_bytes'])}")
        left = ", ".join(v["model"] for v in made["victims"]) or "nothing"
        yield cell(f"left for it, and returns after it: {left}")
        yield cell(f"give it back sooner with `arbiter drain {lease['ticket']}`")
    if made["stays"]:
        yield ""
        rows = [
            (s["model"], s["ticket"], sizes(s["charged_bytes"]), s["why"]) for s in made["stays"]
        ]
        yield table(("stays", "ticket", "holds", "because"), rows)
