"""`arbiter top`: what holds device memory, as it changes (K4)."""

import sys
from importlib.util import find_spec
from typing import Annotated

import typer

from deployments.cli import http
from deployments.cli.http import Url
from deployments.cli.output import AsJson, CommandError, show


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Memory, models, queue, events and what needs attention, as they change."""
    if once or as_json or not sys.stdout.isatty():
        _print_once(as_json, url)
        return
    from deployments.cli.see.top.watch import draw_until_quit, watching

    with watching(url) as watch:
        if find_spec("textual"):
            from deployments.cli.see.top.screen import Screen

            Screen(watch).run()
        else:
            draw_until_quit(watch)
        watch.check()


def _print_once(as_json: bool, url: str | None) -> None:
    from deployments.cli.see.top import rows
    from deployments.monitoring.story import event_row
    from deployments.monitoring.view import from_plain

    with http.front(url) as front:
        plain = front.get("/arbiter/view")
        events = front.get("/arbiter/events/recent")["events"] if not as_json else []
    try:
        view = from_plain(plain)
    except ValueError as error:
        raise CommandError(str(error)) from error
    show(as_json, plain, *rows.frame(view, [event_row(event) for event in events]))
