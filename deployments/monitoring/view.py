"""The view model of console and `arbiter top` (K4): the arbiter's state as typed rows.

    view = view_of(state, facts, now_unix_s)   # in the front; pure
    view = from_plain(answer)                  # of `GET /arbiter/view`, in a client

Both screens draw these rows and compute nothing from the state themselves. Times that pass are
`..._unix_s`, so that a row of what rests stays equal, and a stream of changes leaves it out.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from deployments.monitoring.attention import Alert, alerts_of
from deployments.monitoring.parts import Part, parts_of

# The states of tickets of one model, best first: the first one there is the model's.
ORDER = ("resident", "draining", "loading", "asleep", "queued", "reclaiming")
COLD = "cold"


@dataclass(frozen=True, slots=True)
class Facts:
    """What the front knows and the arbiter does not."""

    homes: Mapping[str, str] = field(default_factory=dict)  # model to capability
    adapters: Mapping[str, int] = field(default_factory=dict)  # model to how many it may be given


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """Describes one device. The sizes of `parts` add up to the budget, unless it is overcommitted:
    then to the budget and what is charged beyond it."""

    device: str
    node: str
    kind: str  # gpu, cpu or host
    name: str  # of a GPU with its UUID
    capacity_bytes: int
    budget_bytes: int
    charged_bytes: int
    measured_bytes: int
    foreign_bytes: int
    free_bytes: int  # negative: overcommitted
    largest_fit_bytes: int
    physical_free_bytes: int | None
    pressure: str  # nominal, low or critical
    is_exact: bool
    unreadable: str | None
    loading_fraction: float  # of the last ten minutes
    parts: tuple[Part, ...]  # granted by model, coming back, foreign by name, free


@dataclass(frozen=True, slots=True)
class AdapterCounts:
    """Counts the adapters of one model by tier."""

    hot: int
    warm: int
    cold: int


@dataclass(frozen=True, slots=True)
class ModelRow:
    """Describes one model of the table, or a ticket's model that is not in it."""

    model: str
    capability: str
    state: str  # of its best ticket; `cold` without one
    floor: str  # device, host or cold
    is_pinned: bool = False
    tickets: tuple[str, ...] = ()  # the best first
    inflight: int = 0
    since_unix_s: float | None = None  # in this state
    leaves_unix_s: float | None = None  # by keep-warm; None: in use, for ever, or not there
    charged_bytes: int = 0  # on devices that compute
    measured_bytes: int = 0
    host_bytes: int = 0  # charged on hosts
    learned_bytes: int = 0  # needed by its load, up to its first use; 0: not known
    wasted_bytes: int = 0  # held beyond what a new load would be granted
    load_s: float | None = None
    wake_s: float | None = None
    leaving: str | None = None  # the reason
    hours: str | None = None
    is_open: bool = True  # of its hours
    cools_until_unix_s: float | None = None
    failure: str | None = None  # the cause of the cool-down
    adapters: AdapterCounts | None = None  # None: it takes none


@dataclass(frozen=True, slots=True)
class QueueRow:
    """Describes one queued ticket."""

    position: int  # in the queue of its node, from 1
    node: str
    ticket: str
    capability: str
    model: str
    priority: str
    tenant: str
    need_bytes: int
    since_unix_s: float
    expected_unix_s: float | None  # until it serves; None: nothing is known
    deadline_unix_s: float | None
    is_late: bool  # expected after its deadline, or later than expected


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """Describes memory lent to a process outside Serve."""

    ticket: str
    name: str
    tenant: str
    state: str
    is_preemptible: bool
    frees: bool  # of `arbiter free`
    charged_bytes: int
    measured_bytes: int
    ends_unix_s: float | None


@dataclass(frozen=True, slots=True)
class TenantRow:
    """Describes one tenant, by what its clients use, and its limits where it has some."""

    tenant: str
    held_bytes: int
    requests_count: int
    byte_seconds_count: int
    most_bytes: int | None = None
    reserved_bytes: int = 0
    average_bytes: int = 0
    average_most_bytes: int | None = None
    is_cooling: bool = False
    share_fraction: float | None = None


@dataclass(frozen=True, slots=True)
class SlabRow:
    """Describes one slab of a node's pool, or a copy of models' files in its host RAM."""

    slab: str  # NODE/number
    content: str
    owner: str
    users: tuple[str, ...]  # the engine that writes it, or those that have the copy open
    allocated_bytes: int
    limit_bytes: int
    rows_count: int
    hits_count: int
    misses_count: int
    namespace: str  # of what gives its rows their meaning; empty: no engine has written it


@dataclass(frozen=True, slots=True)
class JobRow:
    """Describes one batch or single job."""

    id: str
    kind: str  # batch, async or response
    state: str
    model: str  # those of a batch, with commas; empty: not known yet
    tenant: str
    done: int  # lines of a batch; a single job has one
    failed: int
    total: int
    created_unix_s: float
    ended_unix_s: float | None  # None: unfinished


@dataclass(frozen=True, slots=True)
class View:
    """Shows all that console and terminal draw."""

    at_unix_s: float  # when the arbiter was asked
    epoch: int
    version: str
    sequence: int  # of the newest event that it includes
    policy: str
    generation: int  # of the settings
    is_settled: bool
    is_closing: bool
    devices: tuple[DeviceRow, ...]
    models: tuple[ModelRow, ...]  # those with a ticket first, then by name
    queue: tuple[QueueRow, ...]
    leases: tuple[LeaseRow, ...]
    tenants: tuple[TenantRow, ...]
    slabs: tuple[SlabRow, ...]
    jobs: tuple[JobRow, ...]  # the unfinished ones first, of both the newest first
    alerts: tuple[Alert, ...]  # what needs attention, the worst first; empty: nothing does


def view_of(state: Mapping[str, Any], facts: Facts, now_unix_s: float) -> View:
    """`state`: as `GET /arbiter/state` has it. `now_unix_s`: when it was read."""
    queue = tuple(_queue(state, now_unix_s))
    return View(
        at_unix_s=now_unix_s,
        epoch=state["epoch"],
        version=state["version"],
        sequence=state["sequence"],
        policy=state["policy"],
        generation=state["generation"],
        is_settled=state["is_settled"],
        is_closing=state["is_closing"],
        devices=tuple(_device(row, state["tickets"]) for row in state["devices"]),
        models=tuple(_models(state, facts, now_unix_s)),
        queue=queue,
        leases=tuple(_lease(t, now_unix_s) for t in _leased(state["tickets"])),
        tenants=tuple(_tenants(state)),
        slabs=tuple(map(_slab, state["slabs"])),
        jobs=tuple(_jobs(state)),
        alerts=tuple(alerts_of(state)),
    )


def to_plain(view: View) -> dict[str, Any]:
    """The view as plain values for JSON."""
    plain: dict[str, Any] = msgspec.to_builtins(view)
    return plain


def from_plain(plain: Mapping[str, Any]) -> View:
    """Raises ValueError, naming the field, for what is no view of this version."""
    try:
        return msgspec.convert(plain, View)
    except msgspec.ValidationError as error:
        raise ValueError(f"the front's view is of another version: {error}") from error


def computing_bytes(sizes: Mapping[str, int]) -> int:
    """What lies on devices that compute, of sizes by device."""
    return sum(size for device, size in sizes.items() if not device.endswith("/host"))


def _device(row: Mapping[str, Any], tickets: list[dict[str, Any]]) -> DeviceRow:
    names = DeviceRow.__dataclass_fields__.keys() - {"name", "parts"}
    card = f"{row['name']} {row['uuid']}".strip()
    parts = tuple(parts_of(row, tickets))
    return DeviceRow(**{name: row[name] for name in names}, name=card, parts=parts)


def _models(state: Mapping[str, Any], facts: Facts, now_unix_s: float) -> list[ModelRow]:
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for ticket in state["tickets"]:
        if not ticket["lease"]:
            rows.setdefault((ticket["capability"], ticket["model"]), []).append(ticket)
    for model, capability in facts.homes.items():
        rows.setdefault((capability, model), [])
    more = _ModelFacts(state, facts, now_unix_s)
    rows_shown = [more.row(name, tickets) for name, tickets in rows.items()]
    return sorted(rows_shown, key=lambda row: (row.state == COLD, row.model, row.capability))


class _ModelFacts:
    """What the state says of models apart from their tickets, by name."""

    def __init__(self, state: Mapping[str, Any], facts: Facts, now_unix_s: float) -> None:
        self._now_unix_s, self._listed = now_unix_s, facts.adapters
        self._floors = _by_name(state["floors"])
        self._loads = _by_name(state["load_times"])
        self._cooling = _by_name(state["cooldowns"])
        self._hours = _by_name(row for row in state["hours"] if row["work"] == "model")
        self._images = {
            row["slab"]["owner"].partition("/")[2]: row["slab"]
            for row in state["slabs"]
            if row["slab"]["content"] == "adapter"
        }

    def row(self, name: tuple[str, str], tickets: list[dict[str, Any]]) -> ModelRow:
        capability, model = name
        load, hours, cooling = (
            table.get(name, {}) for table in (self._loads, self._hours, self._cooling)
        )
        now = self._of_tickets(sorted(tickets, key=lambda t: ORDER.index(t["state"])))
        until = cooling.get("left_s")
        return ModelRow(
            model=model,
            capability=capability,
            floor=self._floors.get(name, {}).get("floor", COLD),
            load_s=load.get("load_s"),
            wake_s=load.get("wake_s"),
            hours=hours.get("hours"),
            is_open=hours.get("is_open", True),
            cools_until_unix_s=None if until is None else round(self._now_unix_s + until),
            failure=cooling.get("cause"),
            adapters=self._adapters(model),
            **now,
        )

    def _of_tickets(self, tickets: list[dict[str, Any]]) -> dict[str, Any]:
        if not tickets:
            return {"state": COLD}
        best = tickets[0]
        charged = [ticket["charged_bytes"] for ticket in tickets]
        compute = sum(computing_bytes(sizes) for sizes in charged)
        return {
            "state": best["state"],
            "tickets": tuple(ticket["ticket"] for ticket in tickets),
            "is_pinned": any(ticket["pinned"] for ticket in tickets),
            "inflight": sum(ticket["inflight"] for ticket in tickets),
            "since_unix_s": round(self._now_unix_s - best["in_state_s"], 1),
            "leaves_unix_s": self._leaves(best),
            "charged_bytes": compute,
            "measured_bytes": sum(computing_bytes(t["measured_bytes"]) for t in tickets),
            "host_bytes": sum(sum(sizes.values()) for sizes in charged) - compute,
            "learned_bytes": max(ticket["settled_bytes"] for ticket in tickets),
            "wasted_bytes": sum(ticket["wasted_bytes"] for ticket in tickets),
            "leaving": best["leaving"],
        }

    def _leaves(self, ticket: Mapping[str, Any]) -> float | None:
        """Returns when the model leaves by keep-warm, after what a client asked for, in seconds of
        the wall clock. None: it does not (pinned, or a negative term), or it is not idle."""
        if ticket["idle_s"] is None or ticket["pinned"] or ticket["keep_warm_s"] < 0:
            return None
        left_s: float = ticket["stay_warm_s"] + ticket["keep_warm_s"] - ticket["idle_s"]
        return round(self._now_unix_s + left_s, 1)

    def _adapters(self, model: str) -> AdapterCounts | None:
        if model not in self._listed and model not in self._images:
            return None
        slab = self._images.get(model, {"hot_count": 0, "rows_count": 0})
        hot, images = slab["hot_count"], slab["rows_count"]
        cold = self._listed.get(model, 0) - max(hot, images)
        return AdapterCounts(hot, max(0, images - hot), max(0, cold))


def _by_name(rows: Any) -> dict[tuple[str, str], Any]:
    return {(row["capability"], row["model"]): row for row in rows}


def _queue(state: Mapping[str, Any], now_unix_s: float) -> Iterator[QueueRow]:
    tickets = {ticket["ticket"]: ticket for ticket in state["tickets"]}
    for row in state["queue"]:
        ticket = tickets[row["ticket"]]
        expected, left_s = row["predicted_s"], row["left_s"]
        yield QueueRow(
            row["position"],
            ticket["node"],
            row["ticket"],
            row["capability"],
            row["model"],
            row["priority"],
            ticket["tenant"],
            ticket["need_bytes"],
            round(now_unix_s - row["waited_s"], 1),
            None if expected is None else round(now_unix_s + expected, 1),
            None if left_s is None else round(now_unix_s + left_s, 1),
            expected is not None and (expected == 0 or (left_s is not None and expected > left_s)),
        )


def _leased(tickets: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Those of processes outside Serve. Node agents hold host copies by leases as well."""
    return (t for t in tickets if t["lease"] and not t["lease"].get("on_host"))


def _lease(ticket: Mapping[str, Any], now_unix_s: float) -> LeaseRow:
    left_s, lease = ticket["left_s"], ticket["lease"]
    return LeaseRow(
        ticket["ticket"],
        ticket["model"],
        lease["tenant"],
        ticket["state"],
        lease["preemptible"],
        lease["frees"],
        computing_bytes(ticket["charged_bytes"]),
        computing_bytes(ticket["measured_bytes"]),
        None if left_s is None else round(now_unix_s + left_s, 1),
    )


def _tenants(state: Mapping[str, Any]) -> Iterator[TenantRow]:
    """Those with limits and those of known clients, by name."""
    limits = {row["tenant"]: row for row in state["tenants"]}
    for name in sorted(limits.keys() | {row["tenant"] for row in state["clients"]}):
        clients = [row for row in state["clients"] if row["tenant"] == name]
        held = sum(row["held_bytes"] for row in clients)
        yield TenantRow(
            **{"tenant": name, "held_bytes": held} | limits.get(name, {}),
            requests_count=sum(row["requests_count"] for row in clients),
            byte_seconds_count=sum(row["byte_seconds_count"] for row in clients),
        )


def _jobs(state: Mapping[str, Any]) -> list[JobRow]:
    rows_shown = [
        JobRow(
            *(row["id"], row["kind"], row["state"], row["model"], row["tenant"]),
            *(row["done"], row["failed"], row["total"], row["created_s"], row["ended_s"]),
        )
        for row in state["jobs"]
    ]
    return sorted(rows_shown, key=lambda row: (row.ended_unix_s is not None, -row.created_unix_s))


def _slab(row: Mapping[str, Any]) -> SlabRow:
    slab, users = row["slab"], tuple(row["users"])
    rest = {name: slab[name] for name in SlabRow.__dataclass_fields__.keys() - {"slab", "users"}}
    return SlabRow(slab=f"{row['node']}/{slab['slab']}", users=users, **rest)
