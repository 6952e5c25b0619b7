"""What `arbiter top` shows, as rows and bars: pure, so that textual and rich draw the same."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from deployments.cli.output import STYLES, cell, clean, size, span, table
from deployments.monitoring.attention import CRITICAL
from deployments.monitoring.parts import COMING_BACK, FOREIGN, FREE, GRANTED, Part
from deployments.monitoring.story import BAD, CAME, PLAIN, WENT, EventRow
from deployments.monitoring.view import (
    DeviceRow,
    JobRow,
    LeaseRow,
    ModelRow,
    QueueRow,
    SlabRow,
    View,
)

BAR_WIDTH = 48  # beside a device's name on a terminal of 80
MEASURED = "measured"  # the part of what is granted that is held by now
# Each kind has a sign of its own, so that a bar is read without colours as well.
SIGNS = {MEASURED: "█", GRANTED: "▓", COMING_BACK: "░", FOREIGN: "▒", FREE: "·"}
COLOURS = {MEASURED: "green", GRANTED: "cyan", COMING_BACK: "magenta", FOREIGN: "red", FREE: "dim"}
WORDS = {COMING_BACK: "coming back"}
TONES = {CAME: "green", WENT: "magenta", BAD: "red", PLAIN: ""}
HOLDERS_SHOWN = 6  # beneath a bar, the largest
EVENTS_ONCE = 10  # of one frame

ADAPTERS = "adapters"
TABS = ("models", "queue", "jobs", "leases", "pool", "events", ADAPTERS)
Value = str | int | Text | None


@dataclass(frozen=True, slots=True)
class Selection:
    """What the person at the terminal has chosen."""

    tab: str = TABS[0]
    order: str = "state"

    def next_tab(self) -> "Selection":
        return Selection(_next(TABS, self.tab), self.order)

    def next_order(self) -> "Selection":
        return Selection(self.tab, _next(tuple(ORDERS), self.order))


def _next(names: Sequence[str], now: str) -> str:
    return names[(names.index(now) + 1) % len(names)]


@dataclass(frozen=True, slots=True)
class Rows:
    """Columns by their heads; those in `numbers` end at the right."""

    head: tuple[str, ...]
    rows: list[tuple[Value, ...]]
    numbers: tuple[str, ...] = ()
    nothing: str = ""  # said when there are none

    def drawn(self) -> RenderableType:
        if not self.rows:
            return Text(self.nothing, "dim")
        return table(self.head, self.rows, self.numbers)


# -- memory ----------------------------------------------------------------------------------------


def title(view: View, away_unix_s: float | None, now_unix_s: float) -> Text:
    """One line about the arbiter."""
    if away_unix_s is not None:
        away = span(max(0.0, now_unix_s - away_unix_s))
        return Text(f"The arbiter has not answered for {away}; what is shown is older.", "bold red")
    warm_count = sum(row.state != "cold" for row in view.models)
    line = f"arbiter {view.version}, epoch {view.epoch}, policy {view.policy}"
    return Text(f"{line}; {warm_count} of {len(view.models)} models, {len(view.queue)} queued")


def attention(view: View) -> list[Text]:
    """A line for each thing that needs a person."""
    return [
        Text(f"! {clean(row.text)}", "bold red" if row.level == CRITICAL else "yellow")
        for row in view.alerts
    ]


def legend() -> Text:
    """What the signs of a bar mean."""
    text = Text()
    for kind, sign in SIGNS.items():
        text.append(sign, COLOURS[kind]).append(f" {WORDS.get(kind, kind)}  ", "dim")
    return text


def memory(devices: Iterable[DeviceRow], width: int = BAR_WIDTH) -> Group:
    """A bar of each device's budget, its sums, and who holds the most."""
    return Group(*(part for device in devices for part in _device(device, width)))


def _device(device: DeviceRow, width: int) -> list[RenderableType]:
    sums = amounts(device)
    name = f"{device.device} {clean(device.name)}".strip()
    head = Text(f"{name}: {size(device.budget_bytes)} to lend, free {size(device.free_bytes)}")
    if device.pressure != "nominal":
        head.append(f", pressure {device.pressure}", STYLES.get(device.pressure, ""))
    if device.unreadable is not None:
        head.append(f", unreadable: {clean(device.unreadable)}", "bold red")
    line = bar(sums, width)
    granted = sum(part.size_bytes for part in device.parts if part.kind == GRANTED)
    sizes = {GRANTED: granted, MEASURED: device.measured_bytes, FOREIGN: device.foreign_bytes}
    sizes[COMING_BACK] = sums[COMING_BACK]
    line.append("  " + ", ".join(f"{WORDS.get(k, k)} {size(v)}" for k, v in sizes.items() if v))
    return [head, line, *_holders(device)]


def _holders(device: DeviceRow) -> list[Text]:
    held = sorted((p for p in device.parts if p.kind != FREE), key=lambda p: -p.size_bytes)
    if not held:
        return []
    more = f", {len(held) - HOLDERS_SHOWN} more" if len(held) > HOLDERS_SHOWN else ""
    shown = ", ".join(_holder(part) for part in held[:HOLDERS_SHOWN])
    return [Text(f"  {shown}{more}", "dim")]


def _holder(part: Part) -> str:
    kind = {FOREIGN: "foreign ", COMING_BACK: "leaving "}.get(part.kind, "")
    return f"{kind}{clean(part.label)} {size(part.size_bytes)}"


def amounts(device: DeviceRow) -> dict[str, int]:
    """Bytes of the budget by kind. What is granted is split into what its holder has by now and the
    rest."""
    totals = dict.fromkeys(SIGNS, 0)
    for part in device.parts:
        if part.kind == GRANTED:
            held = min(part.measured_bytes or 0, part.size_bytes)
            totals[MEASURED] += held
            totals[GRANTED] += part.size_bytes - held
        else:
            totals[part.kind] += part.size_bytes
    return totals


def bar(sums: dict[str, int], width: int) -> Text:
    """`width` signs, shared out by bytes: each kind begins where the sums before it end, so that
    no rounding adds up."""
    whole, text, begins, so_far = sum(sums.values()), Text(), 0, 0
    for kind, amount in sums.items():
        so_far += amount
        ends = round(width * so_far / whole) if whole else 0
        text.append(SIGNS[kind] * (ends - begins), COLOURS[kind])
        begins = ends
    return text.append(SIGNS[FREE] * (width - begins), COLOURS[FREE])


# -- rows ------------------------------------------------------------------------------------------

ORDERS: dict[str, Callable[[ModelRow], tuple[object, ...]]] = {
    "state": lambda row: (),  # as the view has them: what is there first, then by name
    "name": lambda row: (row.model, row.capability),
    "memory": lambda row: (-(row.charged_bytes + row.host_bytes), row.model),
    "requests": lambda row: (-row.inflight, row.model),
}


def models(view: View, order: str, now_unix_s: float) -> Rows:
    head = ("model", "capability", "state", "for", "in flight", "charged", "measured", "in RAM")
    rows = [_model(row, now_unix_s) for row in sorted(view.models, key=ORDERS[order])]
    return Rows((*head, "leaves in", "note"), rows, ("for", *head[4:], "leaves in"), "no models")


def _model(row: ModelRow, now: float) -> tuple[Value, ...]:
    return (
        row.model,
        row.capability,
        cell(row.state),
        _since(row.since_unix_s, now),
        row.inflight or None,
        _some(row.charged_bytes),
        _some(row.measured_bytes),
        _some(row.host_bytes),
        _until(row.leaves_unix_s, now),
        _note(row),
    )


def _note(row: ModelRow) -> str:
    notes = ["pinned"] * row.is_pinned
    notes += [f"leaves: {row.leaving}"] * bool(row.leaving)
    notes += ["outside its hours"] * (not row.is_open)
    notes += [f"failed: {row.failure}"] * bool(row.failure)
    if row.adapters:
        hot, warm, cold = row.adapters.hot, row.adapters.warm, row.adapters.cold
        notes.append(f"adapters {hot} hot, {warm} warm, {cold} cold")
    return "; ".join(notes)


def queue(rows: Iterable[QueueRow], now_unix_s: float) -> Rows:
    head = ("position", "ticket", "model", "needs", "waited", "expected in", "deadline in")
    lines: list[tuple[Value, ...]] = [
        (
            row.position,
            row.ticket,
            row.model,
            size(row.need_bytes),
            _since(row.since_unix_s, now_unix_s),
            _late(row, now_unix_s),
            _until(row.deadline_unix_s, now_unix_s),
        )
        for row in rows
    ]
    return Rows(head, lines, (head[0], *head[3:]), "nothing is queued")


def _late(row: QueueRow, now: float) -> Text:
    return Text(_until(row.expected_unix_s, now), "red" if row.is_late else "")


def jobs(rows: Iterable[JobRow], now_unix_s: float) -> Rows:
    head = ("job", "kind", "state", "done", "failed", "of", "model", "tenant", "age")
    lines: list[tuple[Value, ...]] = [
        (
            *(row.id, row.kind, cell(row.state), row.done, row.failed or None, row.total),
            *(row.model, row.tenant, _since(row.created_unix_s, now_unix_s)),
        )
        for row in rows
    ]
    return Rows(head, lines, ("done", "failed", "of", "age"), "no batch and no job")


def leases(rows: Iterable[LeaseRow], now_unix_s: float) -> Rows:
    head = ("lease", "name", "tenant", "state", "charged", "measured", "ends in")
    lines: list[tuple[Value, ...]] = [
        (
            row.ticket,
            row.name,
            row.tenant,
            cell(row.state),
            size(row.charged_bytes),
            size(row.measured_bytes),
            _until(row.ends_unix_s, now_unix_s),
        )
        for row in rows
    ]
    return Rows(head, lines, head[4:], "no memory is leased")


def pool(rows: Iterable[SlabRow]) -> Rows:
    head = ("slab", "content", "owner", "used by", "namespace")
    numbers = ("takes", "of", "rows", "hits", "misses")
    lines: list[tuple[Value, ...]] = [
        (
            row.slab,
            row.content,
            row.owner,
            ", ".join(row.users) or "idle",
            row.namespace or None,
            size(row.allocated_bytes),
            size(row.limit_bytes),
            row.rows_count,
            row.hits_count,
            row.misses_count,
        )
        for row in rows
    ]
    return Rows((*head, *numbers), lines, numbers, "no engine keeps anything beyond its life")


def events(rows: Iterable[EventRow]) -> Rows:
    """Newest first."""
    lines: list[tuple[Value, ...]] = [
        (
            time.strftime("%H:%M:%S", time.localtime(row.unix_s)),
            Text(row.kind, TONES[row.tone]),
            row.text,
        )
        for row in rows
    ]
    return Rows(("time", "event", "what happened"), lines[::-1], (), "no event yet")


@dataclass(frozen=True, slots=True)
class AdapterRow:
    """Describes one adapter."""

    name: str  # with its model
    tier: str  # hot, warm, cold, or empty: it is not known


def adapter_rows(plain: Mapping[str, Any]) -> tuple[AdapterRow, ...]:
    """Reads the answer of `GET /arbiter/view/adapters`."""
    return tuple(AdapterRow(name, plain["tiers"].get(name, "")) for name in plain["adapters"])


def adapters(rows: Iterable[AdapterRow]) -> Rows:
    lines: list[tuple[Value, ...]] = [(row.name, row.tier or None) for row in rows]
    return Rows(("adapter", "tier"), lines, (), "no adapter was found")


def chosen(
    view: View,
    event_rows: Sequence[EventRow],
    choice: Selection,
    now_unix_s: float,
    adapter_rows: Iterable[AdapterRow] = (),
) -> Rows:
    """The rows of the tab. `found`: the adapters."""
    match choice.tab:
        case "models":
            return models(view, choice.order, now_unix_s)
        case "queue":
            return queue(view.queue, now_unix_s)
        case "jobs":
            return jobs(view.jobs, now_unix_s)
        case "leases":
            return leases(view.leases, now_unix_s)
        case "pool":
            return pool(view.slabs)
        case "adapters":
            return adapters(adapter_rows)
    return events(event_rows)


def _since(unix_s: float | None, now: float) -> str:
    return span(None if unix_s is None else max(0.0, now - unix_s))


def _until(unix_s: float | None, now: float) -> str:
    return span(None if unix_s is None else max(0.0, unix_s - now))


def _some(size_bytes: int) -> str | None:
    return size(size_bytes) if size_bytes else None


# -- frames ----------------------------------------------------------------------------------------


def frame(view: View, event_rows: Sequence[EventRow]) -> list[RenderableType]:
    """All of it, one after the other, as of the view's own time."""
    now = view.at_unix_s
    parts: list[RenderableType] = [title(view, None, now)]
    parts += attention(view)
    parts += ["", memory(view.devices), legend()]
    parts += ["", models(view, "state", now).drawn()]
    parts += ["", queue(view.queue, now).drawn()]
    if view.jobs:
        parts += ["", jobs(view.jobs, now).drawn()]
    if view.leases:
        parts += ["", leases(view.leases, now).drawn()]
    if view.slabs:
        parts += ["", pool(view.slabs).drawn()]
    return [*parts, "", events(list(event_rows)[-EVENTS_ONCE:]).drawn()]


def tab_line(choice: Selection) -> Text:
    """The tabs, with the keys."""
    text = Text()
    for name in TABS:
        text.append(f" {name} ", "reverse" if name == choice.tab else "").append(" ")
    return text.append(f" tab: view, s: sort ({choice.order}), q: quit", "dim")
