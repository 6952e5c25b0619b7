"""`arbiter free --gb 8`: device memory for a person, at once; the models return after it.

Idle models leave whatever their minimum residency; what is pinned or in use stays, and is named.
The memory is held while a command runs, or for a term.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from arbiter import leases
from arbiter.errors import RequestError
from arbiter.leases import LeaseLost
from deployments.cli.http import Url, address, api_key, front
from deployments.cli.leases.lease import run_command
from deployments.cli.output import AsJson, CommandError, cell, show, sizes, table, working
from deployments.cli.see import plan

NOTICE_S = 10.0  # for COMMAND to end, should the arbiter want the memory back
WITHIN_S = 25.0  # less than a command waits for an answer (http.ANSWER_S); a barrier lasts 10 s
_TERM = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def _term(text: str) -> str:
    if not (match := _TERM.fullmatch(text.strip())):
        raise typer.BadParameter(f"{text!r} is not a time; write 90s, 30m, 2h or seconds")
    term_s = float(match[1]) * _SECONDS[match[2]]
    if not math.isfinite(term_s):
        raise typer.BadParameter("that is longer than any number of seconds; write 90s, 30m or 2h")
    return str(term_s)


def free(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND]", help="A command, after `--`.")
    ] = None,
    gb: Annotated[float, typer.Option(help="GiB to free on one device.")] = 0.0,
    term_text: Annotated[
        str,
        typer.Option("--for", metavar="TIME", callback=_term, help="How long, as 90s, 30m or 2h."),
    ] = "1h",
    name: Annotated[str, typer.Option(help="The lease's name in lists.")] = "hold",
    node: Annotated[
        str | None, typer.Option(help="The node, from `arbiter status`, if there are several.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would leave and what stays.")
    ] = False,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Free device memory at once, and hold it: while COMMAND runs, else for a term.

    Pinned models and models in use stay. What left is loaded again afterwards.
    """
    if not 0 < gb < math.inf:
        raise typer.BadParameter("say how much by --gb")
    body = {"gb": gb, "term_s": float(term_text), "name": name, "node": node}
    more = {"kept": not words, "notice_s": NOTICE_S, "within_s": WITHIN_S, "dry_run": dry_run}
    question = {key: value for key, value in (body | more).items() if value is not None}
    with front(url) as f, working(f"freeing {gb:g} GiB"):
        reply = f.send("POST", "/arbiter/free", question)
    if dry_run or not words:
        return show(as_json, reply, *_lines(reply))
    raise typer.Exit(_run(words, _freed(body, reply["id"], address(url)), as_json))


def _freed(body: Mapping[str, Any], lease: str, where: str) -> leases.Lease:
    """The lease that the front has begun, as this process goes on with it."""
    way = leases.HttpTransport(where, api_key(where))
    how = {key: body[key] for key in ("name", "node", "term_s")}
    held = leases.ask(body["gb"], **how, notice_s=NOTICE_S, way=way)
    held.id = lease
    return held


def _run(words: list[str], lease: leases.Lease, as_json: bool) -> int:
    try:
        return run_command(words, lease.acquire(), as_json)
    except (RequestError, LeaseLost, OSError) as error:
        raise CommandError(str(error)) from error


def _lines(reply: dict[str, Any]) -> Iterator[RenderableType]:
    lease, dry_run = reply["lease"], reply["plan"]
    if lease is None:
        yield from plan.lines(dry_run)
    else:
        yield cell(f"{lease['ticket']} holds {sizes(lease['devices_bytes'])}")
        leaving = ", ".join(v["model"] for v in dry_run["victims"]) or "nothing"
        yield cell(f"left for it, and returns after it: {leaving}")
        yield cell(f"give it back sooner with `arbiter drain {lease['ticket']}`")
    if dry_run["stays"]:
        yield ""
        rows = [
            (s["model"], s["ticket"], sizes(s["charged_bytes"]), s["why"]) for s in dry_run["stays"]
        ]
        yield table(("stays", "ticket", "holds", "because"), rows)
