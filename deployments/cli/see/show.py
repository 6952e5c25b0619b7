"""Commands that look and change nothing: state, events, explanations, accounts, models, leases."""

import time
from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import RenderableType
from rich.text import Text

from arbiter.units import GIB
from deployments.cli.http import Front, Url, front
from deployments.cli.output import (
    AsJson,
    cell,
    clean,
    show,
    show_line,
    size,
    sizes,
    span,
    table,
)

DEVICE_SIZES = ("budget", "free", "charged", "measured", "foreign", "largest_fit")
EVENT_STYLES = {
    "error": "red",
    "failed": "red",
    "lost": "red",
    "refused": "yellow",
    "evict": "magenta",
    "load": "green",
    "wake": "green",
}


def status(as_json: AsJson = False, url: Url = None) -> None:
    """Devices, tickets, queue and cool-downs."""
    with front(url) as f:
        state = f.get("/arbiter/state")
    show(as_json, state, *_status(state))


def _status(state: dict[str, Any]) -> Iterator[RenderableType]:
    yield f"arbiter {state['version']}, epoch {state['epoch']}, policy {state['policy']}"
    if state["is_closing"]:
        yield Text("It is shutting down and grants nothing more.", "yellow")
    elif not state["is_settled"]:
        yield Text("It waits for the holders of its last epoch and grants nothing yet.", "yellow")
    yield ""
    yield _devices(state["devices"])
    if gpus := [device for device in state["devices"] if device["kind"] == "gpu"]:
        yield ""
        yield _cards(gpus)
    yield ""
    yield _tickets(state["tickets"])
    if state["queue"]:
        yield ""
        yield _queue(state["queue"])
    for row in state["hours"]:
        yield cell(_hours(row))
    for failure in state["cooldowns"]:
        text = f"cooling down: {failure['model']} for {failure['left_s']:.0f} s more"
        yield Text(clean(f"{text}, after {failure['times']} failures: {failure['cause']}"), "red")


def _hours(row: dict[str, Any]) -> str:
    """The hours of a model, or of batch work (C13)."""
    model = row["model"] or "every model"
    whose = f"batch work of {model}" if row["work"] == "batch" else model
    return f"hours of {whose}: {_hours_now(row)}"


def _hours_now(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    change = "closes" if row["is_open"] else "opens"
    return f"{row['hours']}, {change} in {span(row['left_s'])}"


def _devices(devices: list[dict[str, Any]]) -> RenderableType:
    rows = [
        (
            d["device"],
            *(size(d[f"{what}_bytes"]) for what in DEVICE_SIZES),
            d["pressure"],
            f"{d['loading_fraction']:.0%}",
        )
        for d in devices
    ]
    heads = tuple(name.replace("_", " ") for name in DEVICE_SIZES)
    return table(("device", *heads, "pressure", "loading"), rows, numbers=(*heads, "loading"))


def _cards(gpus: list[dict[str, Any]]) -> RenderableType:
    """The card behind each GPU, as NVML tells it, and the processes on it that are not ours."""
    rows = [
        (
            d["device"],
            d["name"],
            d["uuid"],
            size(d["capacity_bytes"]),
            size(d["physical_free_bytes"]),
            ", ".join(
                f"{process['name'] or 'a process'} {process['pid']}: {size(process['size_bytes'])}"
                for process in d["foreign_processes"]
            ),
        )
        for d in gpus
    ]
    numbers = ("total", "free on the card")
    return table(("card of", "name", "UUID", *numbers, "processes of others"), rows, numbers)


def _tickets(tickets: list[dict[str, Any]]) -> RenderableType:
    rows = [
        (
            t["ticket"],
            t["capability"],
            t["model"],
            t["state"],
            span(t["in_state_s"]),
            t["inflight"],
            sizes(t["charged_bytes"]),
        )
        for t in tickets
    ]
    heads = ("ticket", "capability", "model", "state", "since", "in flight", "charged")
    return table(heads, rows, numbers=("since", "in flight"))


def _queue(queue: list[dict[str, Any]]) -> RenderableType:
    rows = [
        (
            q["position"],
            q["ticket"],
            q["model"],
            span(q["waited_s"]),
            span(q["predicted_s"]),
            span(q["left_s"]),
        )
        for q in queue
    ]
    heads = ("position", "queued ticket", "model", "waited", "expected in", "deadline in")
    return table(heads, rows, numbers=("position", *heads[3:]))


def events(
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with new events as they happen.")
    ] = False,
    after: Annotated[int, typer.Option(help="Begin after this sequence number.")] = 0,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """What happened, newest last: loads, evictions, refusals. One line an event."""
    with front(url) as f:
        try:
            for event in f.follow(after) if follow else _recent(f, after):
                show_line(as_json, event, event_text(event))
        except KeyboardInterrupt:  # the way to end it
            return


def _recent(f: Front, after: int) -> list[dict[str, Any]]:
    recent: list[dict[str, Any]] = f.get(f"/arbiter/events/recent?after={after}")["events"]
    return recent


def event_text(event: dict[str, Any]) -> Text:
    """One event as a line: number, local time, kind, ticket, bytes, seconds, then what else."""
    left_out = ("seq", "kind", "unix_s", "epoch", "ticket", "size_bytes", "took_s")
    kind = str(event["kind"])
    style = next((s for word, s in EVENT_STYLES.items() if word in kind), "")
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["unix_s"]))
    parts = [Text(f"{event['seq']:>9}  {when}", "dim"), Text(f"{clean(kind):<16}", style)]
    if event.get("ticket"):
        parts.append(Text(clean(event["ticket"])))
    if event.get("size_bytes") is not None:
        parts.append(Text(size(event["size_bytes"])))
    if event.get("took_s") is not None:
        parts.append(Text(f"{event['took_s']:.2f} s"))
    rest = {k: v for k, v in event.items() if k not in left_out and v is not None}
    parts += [Text(clean(f"{name}={value}")) for name, value in rest.items()]
    return Text("  ").join(parts)


def explain(
    ticket: Annotated[
        str, typer.Argument(help="As `arbiter status` and `events` name it, or task:NAME.")
    ],
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Why a ticket waits, or for which ticket and at what price its model left. Of a task: which
    model would be asked first."""
    with front(url) as f:
        explanation = f.get(f"/arbiter/explain/{quote(ticket, safe='')}")
    rungs = [_rungs(explanation["rungs"])] if "rungs" in explanation else []
    show(as_json, explanation, *rungs, *(cell(sentence) for sentence in explanation["sentences"]))


def _rungs(rungs: list[dict[str, Any]]) -> RenderableType:
    rows = [
        (
            row["turn"] or "-",
            row["position"],
            row["model"],
            row["state"],
            *(_seconds(row[name]) for name in ("wait_s", "load_s", "run_s", "total_s")),
        )
        for row in rungs
    ]
    heads = ("turn", "rung", "model", "state", "wait", "load", "run", "in all")
    return table(heads, rows, numbers=(*heads[:2], *heads[4:]))


def _seconds(took_s: float | None) -> str:
    return "unknown" if took_s is None else f"{took_s:.2f} s"


def clients(as_json: AsJson = False, url: Url = None) -> None:
    """What each client has used, and what each tenant may have."""
    with front(url) as f:
        state = f.get("/arbiter/state")
    shown = {"tenants": state["tenants"], "clients": state["clients"]}
    show(as_json, shown, *_clients(state))


def _clients(state: dict[str, Any]) -> Iterator[RenderableType]:
    """Limits first, where there are any, then accounts."""
    if state["tenants"]:
        yield _limits(state["tenants"])
        yield ""
    rows = [
        (
            c["tenant"],
            c["client"],
            c["requests_count"],
            size(c["held_bytes"]),
            f"{c['byte_seconds_count'] / GIB:.1f}",
        )
        for c in state["clients"]
    ]
    heads = ("tenant", "client", "requests", "holds", "GiB seconds")
    yield table(heads, rows, numbers=heads[2:])


def _limits(tenants: list[dict[str, Any]]) -> RenderableType:
    rows = [
        (
            t["tenant"],
            size(t["held_bytes"]),
            size(t["most_bytes"]),
            size(t["reserved_bytes"]),
            size(t["average_bytes"]),
            size(t["average_most_bytes"]),
            t["is_cooling"],
        )
        for t in tenants
    ]
    heads = ("tenant", "holds", "maximum", "reserved", "average", "of", "cooling down")
    return table(heads, rows, numbers=heads[1:6])


def residency(as_json: AsJson = False, url: Url = None) -> None:
    """Where each model is, and how far it may fall."""
    with front(url) as f:
        models = f.get("/arbiter/residency")["models"]
    rows = [
        (
            name,
            m["capability"],
            m["level"],
            m["floor"],
            size(m["host_copy_bytes"]),
            span(m["loading_s"]),
            _hours_now(m["hours"]),
        )
        for name, m in models.items()
    ]
    heads = ("model", "capability", "level", "floor", "host copy", "loading for", "hours")
    show(as_json, models, table(heads, rows, numbers=heads[4:6]))


def copies(as_json: AsJson = False, url: Url = None) -> None:
    """Copies of models' files in host RAM that engines of a node share."""
    with front(url) as f:
        host_copies = f.get("/arbiter/host_copies")["copies"]
    rows = [
        (
            copy["key"],
            copy["node"],
            ", ".join("/".join(model) for model in copy["models"]),
            size(copy["size_bytes"]),
            ", ".join(copy["users"]) or "-",
            "with its last user" if copy["is_leaving"] else "-",
            copy["socket"] or "-",
        )
        for copy in host_copies
    ]
    heads = ("copy", "node", "models", "takes", "used by", "leaves", "for the group at")
    show(as_json, host_copies, table(heads, rows, numbers=("takes",)))


def pool(as_json: AsJson = False, url: Url = None) -> None:
    """What engines keep in host RAM beyond their own lives, by content and slab by slab."""
    with front(url) as f:
        state = f.get("/arbiter/state")
    shown = {"contents": state["contents"], "slabs": state["slabs"]}
    show(as_json, shown, *_pool(state))


def _pool(state: dict[str, Any]) -> Iterator[RenderableType]:
    """What was done with each content since the node's agent started, then the slabs."""
    rows = [
        (
            c["node"],
            c["content"]["content"],
            size(c["content"]["allocated_bytes"]),
            "-" if c["hit_fraction"] is None else f"{c['hit_fraction']:.1%}",
            c["content"]["stored_count"],
            c["content"]["evicted_count"],
            c["content"]["refused_count"],
            c["content"]["saves_count"],
            c["content"]["restored_count"],
            span(c["content"]["load_s"]),
            span(c["content"]["restore_s"]),
        )
        for c in state["contents"]
    ]
    counts = ("takes", "hits", "stored", "evicted", "refused", "saves", "restored")
    numbers = (*counts, "loading", "restoring")
    if rows:
        yield table(("node", "content", *numbers), rows, numbers=numbers)
        yield ""
    yield _slabs(state["slabs"])


def _slabs(slabs: list[dict[str, Any]]) -> RenderableType:
    rows = [
        (
            f"{s['node']}/{s['slab']['slab']}",
            s["slab"]["content"],
            s["slab"]["owner"],
            ", ".join(s["users"]) or "idle",
            size(s["slab"]["allocated_bytes"]),
            size(s["slab"]["limit_bytes"]),
            s["slab"]["rows_count"],
            s["slab"]["hits_count"],
            s["slab"]["misses_count"],
            s["slab"]["evicted_count"],
            s["slab"]["refused_count"],
            s["slab"]["restored_count"],
            s["slab"]["namespace"],
        )
        for s in slabs
    ]
    numbers = ("takes", "of", "rows", "hits", "misses", "evicted", "refused", "restored")
    heads = ("slab", "content", "owner", "used by", *numbers, "namespace")
    return table(heads, rows, numbers=numbers)


def adapters(as_json: AsJson = False, url: Url = None) -> None:
    """Where the adapters of each model are, and where requests found theirs."""
    with front(url) as f:
        slabs = [s for s in f.get("/arbiter/state")["slabs"] if s["slab"]["content"] == "adapter"]
        names = [card["id"] for card in f.get("/v1/models")["data"]]
    tiers = [_tiers(s["node"], s["slab"], names) for s in slabs]
    numbers = ("hot", "warm", "cold", "found hot", "found warm", "found cold", "hits", "evicted")
    rows = [
        (
            tier["model"],
            tier["node"],
            *(tier["adapters"][name] for name in ("hot", "warm", "cold")),
            *(tier["requests"][name] for name in ("hot", "warm", "cold")),
            "-" if tier["hit_rate"] is None else f"{tier['hit_rate']:.0%}",
            tier["evicted_count"],
        )
        for tier in tiers
    ]
    show(as_json, tiers, table(("model", "node", *numbers), rows, numbers=numbers))


def _tiers(node: str, slab: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Adapters of one model on one node by tier, and requests by the tier of theirs. An adapter in
    a slot is hot, and keeps its image."""
    model = slab["owner"].partition("/")[2]
    hot, images = slab["hot_count"], slab["rows_count"]
    listed = sum(name.startswith(f"{model}:") for name in names)
    requests = {
        "hot": slab["hot_hits_count"],
        "warm": slab["hits_count"],
        "cold": slab["misses_count"],
    }
    total = sum(requests.values())
    return {
        "model": model,
        "node": node,
        "adapters": {
            "hot": hot,
            "warm": max(0, images - hot),
            "cold": max(0, listed - max(hot, images)),
        },
        "requests": requests,
        "hit_rate": (total - requests["cold"]) / total if total else None,
        "evicted_count": slab["evicted_count"],
    }


def leases(as_json: AsJson = False, url: Url = None) -> None:
    """Memory lent to processes outside Serve."""
    with front(url) as f:
        lease_rows = f.get("/arbiter/leases")["leases"]
    rows = [
        (
            t["ticket"],
            t["model"],
            t["lease"]["tenant"],
            t["state"],
            sizes(t["charged_bytes"]),
            span(t["left_s"]),
            t["lease"]["preemptible"],
        )
        for t in lease_rows
    ]
    heads = ("lease", "name", "tenant", "state", "charged", "left", "preemptible")
    show(as_json, lease_rows, table(heads, rows, numbers=("left",)))
