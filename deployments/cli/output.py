"""What commands print: tables and colours on a terminal, plain columns in a pipe, JSON if asked to.

Plain text is for scripts: no colour, no folding, columns two spaces apart. JSON is one value, or
one value per line where a command reports as things happen.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from arbiter.units import Bytes, human

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

# Beyond any row: what is folded cannot be searched.
PLAIN_WIDTH = 100_000
STYLES = {
    "resident": "green",
    "asleep": "blue",
    "loading": "yellow",
    "queued": "yellow",
    "draining": "magenta",
    "reclaiming": "magenta",
    "device": "green",
    "host": "blue",
    "critical": "bold red",
    "low": "yellow",
}


class CommandError(Exception):
    """A failure in words for the person at the terminal; the exit status is 1."""


def show(as_json: bool, value: Any, *parts: RenderableType) -> None:
    """Prints `value` as JSON, or else what a person reads of it."""
    if as_json:
        print(json.dumps(value, indent=2))
        return
    console = _console(sys.stdout)
    if console.is_terminal:
        for part in parts:
            console.print(part)
        return
    plain = Console(width=PLAIN_WIDTH, color_system=None, highlight=False)
    with plain.capture() as captured:
        plain.print(*parts, sep="\n")
    for line in captured.get().splitlines():
        print(line.rstrip())


def show_line(as_json: bool, value: Any, text: Text) -> None:
    """Prints one of several values as soon as there is one."""
    if as_json:
        print(json.dumps(value), flush=True)
        return
    console = _console(sys.stdout)
    if console.is_terminal:
        console.print(text, soft_wrap=True)
    else:
        print(text.plain, flush=True)


def say(text: str, style: str = "") -> None:
    """Prints lines for the person, beside the output."""
    for line in text.splitlines():
        _console(sys.stderr).print(Text(clean(line), style), soft_wrap=True)


def table(
    head: Sequence[str], rows: Iterable[Sequence[object]], numbers: Iterable[str] = ()
) -> Table:
    """Columns by their heads; those in `numbers` end at the right."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    right = set(numbers)
    for name in head:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(cell(value) for value in row))
    return made


def cell(value: object) -> Text:
    """Text of a value, coloured where it names a state."""
    if isinstance(value, Text):
        return value
    if isinstance(value, bool):
        return Text("yes" if value else "no")
    text = clean("-" if value is None or value == "" else str(value))
    return Text(text, STYLES.get(text, ""))


def clean(text: str) -> str:
    """The text without line ends and control characters: clients choose names of leases, accounts
    and requests, and a terminal obeys what is in them."""
    return "".join(c if c.isprintable() else " " for c in text)


def size(size_bytes: int | None) -> str:
    return "any" if size_bytes is None else human(Bytes(size_bytes))


def sizes(by_device: dict[str, int]) -> str:
    """Sizes on the devices of a node, as `cpu:0 1.2 GiB, host 300.0 MiB`."""
    return ", ".join(f"{name.rpartition('/')[2]} {size(b)}" for name, b in by_device.items())


def span(seconds: float | None) -> str:
    """Seconds as people say them."""
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner on the terminal while something takes seconds, and the means to change its text."""
    console = _console(sys.stderr)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(what) as status:
        yield status.update


def among(what: str, names: Callable[[], list[str]]) -> Callable[[list[str] | None], list[str]]:
    """A callback for an option that takes some of these names. Its errors list them."""

    def check(values: list[str] | None) -> list[str]:
        if unknown := [name for name in values or [] if name not in names()]:
            known = ", ".join(names())
            raise typer.BadParameter(f"no {what} {unknown[0]!r}; there is: {known}")
        return values or []

    return check


def discard_stdout() -> None:
    """Called once the reader of a pipe has left: what Python writes at its end goes nowhere,
    instead of ending in a traceback (docs.python.org/3/library/signal.html#note-on-sigpipe)."""
    if sys.__stdout__ is not None and sys.stdout is sys.__stdout__:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())


def _console(file: Any) -> Console:
    return Console(file=file, highlight=False, markup=False, emoji=False)
