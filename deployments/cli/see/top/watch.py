"""Follows the front's view for `arbiter top`, and draws it where textual is missing (K4)."""

import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from deployments.cli import http
from deployments.cli.http import NoFront, NotTheFront, Refused
from deployments.cli.output import CommandError
from deployments.cli.see.top import rows as top_rows
from deployments.cli.see.top.rows import ADAPTERS, AdapterRow, Selection
from deployments.monitoring.followed import FollowedStream
from deployments.monitoring.story import EventRow
from deployments.monitoring.view import View

RETRY_S = 1.0  # between two tries while no front answers
ADAPTERS_S = 5.0  # between two looks at adapters, which no stream tells of; as the console has it
ADAPTERS_MOST = 200  # the front's own bound
FRAME_S = 0.25  # between two frames; what has happened is to be seen within a second


class Watch:
    """The view as a thread has it from the front's stream. Its attributes are replaced as wholes,
    so that a screen may read them at any time."""

    def __init__(self, url: str | None) -> None:
        self.view: View | None = None
        self.events: tuple[EventRow, ...] = ()
        self.adapters: tuple[AdapterRow, ...] = ()
        self.tab = ""  # the tab that the screen shows
        self.away_unix_s: float | None = None
        self.trouble = "asking the front"  # why no message comes; empty while messages come
        self.ended = threading.Event()
        self._failure: CommandError | None = None
        self._url, self._followed = url, FollowedStream()

    def check(self) -> None:
        """Raises the CommandError by which following ended, if it did."""
        if self._failure is not None:
            raise self._failure

    def run(self) -> None:
        """Follows the view until `ended` is set. A front that is away is asked again; a refusal
        ends it."""
        while not self.ended.is_set():
            try:
                self._follow()
            except (NoFront, NotTheFront, Refused) as error:
                if not isinstance(error, NoFront) and error.status < 500:
                    self._end(error)
                self.trouble = str(error)
            except ValueError as error:
                self._end(CommandError(str(error)))
            self.ended.wait(RETRY_S)

    def look_up_adapters(self) -> None:
        """Asks the front for adapters while their tab is on the screen, until `ended` is set. A
        front that does not answer is passed over here: `run` says why."""
        due_s = 0.0
        while not self.ended.wait(FRAME_S):
            if self.tab == ADAPTERS and time.monotonic() >= due_s:
                with suppress(CommandError), http.front(self._url) as front:
                    plain = front.get(f"/arbiter/view/adapters?most={ADAPTERS_MOST}")
                    self.adapters = top_rows.adapter_rows(plain)
                due_s = time.monotonic() + ADAPTERS_S

    def _end(self, failure: CommandError) -> None:
        self._failure = failure
        self.ended.set()

    def _follow(self) -> None:
        self._followed.begin_anew()
        with http.front(self._url) as front:
            for message in front.view(self._followed.last_event):
                self._take(message)
                if self.ended.is_set():
                    return

    def _take(self, message: dict[str, Any]) -> None:
        self.view = self._followed.take(message) or self.view
        self.events = tuple(self._followed.events)
        self.away_unix_s, self.trouble = self._followed.away_unix_s, ""


@contextmanager
def watching(url: str | None) -> Iterator[Watch]:
    """Follows the front in threads while the block lasts. They are daemons, because a read of the
    stream ends with the front's next word only."""
    watch = Watch(url)
    for work in (watch.run, watch.look_up_adapters):
        threading.Thread(target=work, daemon=True).start()
    try:
        yield watch
    finally:
        watch.ended.set()


# -- without textual -------------------------------------------------------------------------------


def draw_until_quit(watch: Watch) -> None:
    """Draws with rich until `q`, an interrupt, or the end of the watch."""
    choice = Selection()
    with Live(console=Console(), screen=True, auto_refresh=False) as live, _keys() as read_key:
        while not watch.ended.is_set():
            live.update(screenful(watch, choice, time.time(), live.console.height), refresh=True)
            match read_key(FRAME_S):
                case "q" | "\x03":
                    return
                case "\t":
                    choice = choice.next_tab()
                case "s":
                    choice = choice.next_order()


def screenful(watch: Watch, choice: Selection, now_unix_s: float, height: int) -> RenderableType:
    """One frame: memory above, and of the chosen rows as many as there is room for."""
    trouble = [Text(watch.trouble, "bold red")] if watch.trouble else []
    if watch.view is None:
        return Group(*trouble)
    above = summary(watch.view, watch.away_unix_s, now_unix_s)
    watch.tab = choice.tab
    rows = top_rows.chosen(watch.view, watch.events, choice, now_unix_s, watch.adapters)
    used = sum(len(part.renderables) if isinstance(part, Group) else 1 for part in above)
    del rows.rows[max(1, height - used - len(trouble) - 2) :]  # tabs and heads have a line each
    return Group(*trouble, *above, top_rows.tab_line(choice), rows.drawn())


def summary(view: View, away_unix_s: float | None, now_unix_s: float) -> list[RenderableType]:
    """What is always shown: the arbiter, what needs attention, and memory by device."""
    title = top_rows.title(view, away_unix_s, now_unix_s)
    return [title, *top_rows.attention(view), top_rows.memory(view.devices), top_rows.legend()]


@contextmanager
def _keys() -> Iterator[Any]:
    """Gives what reads one key within some seconds; empty: none came. Keys come without Enter and
    are not echoed while the block lasts."""
    import termios
    import tty

    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    tty.setcbreak(file)

    def read(within_s: float) -> str:
        is_there, _, _ = select.select([file], [], [], within_s)
        return os.read(file, 1).decode(errors="replace") if is_there else ""

    try:
        yield read
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)
