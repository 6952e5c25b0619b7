"""`arbiter top` with textual: the same rows in tables that scroll (K4). Needs the extra `top`."""

import time
from typing import ClassVar

from rich.console import Group
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.coordinate import Coordinate
from textual.widgets import DataTable, Footer, Static, TabbedContent, TabPane

from deployments.cli.output import cell
from deployments.cli.see.top import rows as top_rows
from deployments.cli.see.top import watch as top_watch
from deployments.cli.see.top.rows import TABS, Rows, Selection
from deployments.cli.see.top.watch import Watch


class Screen(App[None]):
    """Draws a Watch until `q` or its end."""

    ENABLE_COMMAND_PALETTE = False
    CSS = "#above { height: auto; max-height: 60%; } TabbedContent { height: 1fr; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("tab", "next_tab", "view", priority=True),
        Binding("s", "next_order", "sort"),
    ]

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch, self._choice = watch, Selection()
        self._filled: dict[str, Rows] = {}  # by tab, as its table shows them
        self._drawn: object = None

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="above"):
            yield Static(id="memory", markup=False)
        with TabbedContent(id="tabs"):
            for name in TABS:
                with TabPane(name, id=name):
                    yield DataTable[object](id=f"{name}-rows", cursor_type="row")
        yield Footer()

    def on_mount(self) -> None:
        self.draw()
        self.set_interval(top_watch.FRAME_S, self.look)

    def on_tabbed_content_tab_activated(self, event: TabbedContent.TabActivated) -> None:
        if event.pane.id in TABS:
            self._choice = Selection(event.pane.id, self._choice.order)
            self.draw()

    def action_next_tab(self) -> None:
        """Shows the next tab's rows."""
        self._choice = self._choice.next_tab()
        self.query_one(TabbedContent).active = self._choice.tab
        self.draw()

    def action_next_order(self) -> None:
        """Sorts the models by something else."""
        self._choice = self._choice.next_order()
        self.draw()

    def look(self) -> None:
        """Draws what has come, and each second the times that pass."""
        watch = self._watch
        latest = watch.view, watch.events, watch.adapters, watch.away_unix_s, watch.trouble
        now = latest, watch.ended.is_set(), int(time.time())
        if now != self._drawn:
            self._drawn = now
            self.draw()

    def draw(self) -> None:
        """Draws the view as it is now."""
        if self._watch.ended.is_set():
            self.exit()
            return
        watch, now = self._watch, time.time()
        if watch.view is None or watch.trouble:
            self.query_one("#memory", Static).update(watch.trouble)
            return
        above = top_watch.summary(watch.view, watch.away_unix_s, now)
        self.query_one("#memory", Static).update(Group(*above))
        self.sub_title = f"sorted by {self._choice.order}"
        watch.tab = self._choice.tab
        rows = top_rows.chosen(watch.view, watch.events, self._choice, now, watch.adapters)
        table: DataTable[object] = self.query_one(f"#{self._choice.tab}-rows", DataTable)
        fill(table, rows, self._filled.get(self._choice.tab))
        self._filled[self._choice.tab] = rows


def fill(table: DataTable[object], rows: Rows, before: Rows | None) -> None:
    """Changes what differs from the rows `before`: 500 rows anew take a quarter of a second. The
    place to which a person scrolled stays."""
    if before is None:
        table.add_columns(*rows.head)
    if before is None or len(before.rows) != len(rows.rows):
        _refill(table, rows)
        return
    for y, (old, new) in enumerate(zip(before.rows, rows.rows, strict=True)):
        for x, value in enumerate(new):
            if old[x] != value:
                table.update_cell_at(Coordinate(y, x), cell(value), update_width=True)


def _refill(table: DataTable[object], rows: Rows) -> None:
    scrolled, cursor = table.scroll_offset, table.cursor_row
    table.clear()
    for row in rows.rows:
        table.add_row(*(cell(value) for value in row))
    if not rows.rows:
        table.add_row(*(rows.nothing, *[""] * (len(rows.head) - 1)))
    table.move_cursor(row=min(cursor, max(0, len(rows.rows) - 1)), scroll=False)
    table.scroll_to(scrolled.x, scrolled.y, animate=False)
