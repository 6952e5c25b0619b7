"""The one table of metric names (K2). Both exporters, the dashboard and the alert rules read it.

Names follow Prometheus: base units, `_total` for counters. No label names an adapter, a request, a
ticket, a holder or a client, because those come and go while a series stays. What labels may hold
is bounded by the configuration (capabilities, models, tenants), by the hardware (nodes, devices) or
by an enumeration of the code (states, reasons, contents, kinds of event, codes of error).
"""

from dataclasses import dataclass
from enum import Enum

from arbiter.core.histogram import RATIO_BOUNDS, SECONDS_BOUNDS


class MetricType(Enum):
    """Names the types of Prometheus; `counter` begins at 0 with each epoch of the arbiter."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """Describes one name: what it counts, in which unit, by which labels."""

    name: str
    kind: MetricType
    unit: str  # bytes, seconds, ratio; empty: a plain number
    labels: tuple[str, ...]
    help: str
    bounds: tuple[float, ...] = ()  # of a histogram's buckets, in its unit, without +Inf


DEVICE = ("node", "device")
MODEL = ("capability", "model")
CAPABILITY = ("capability",)
POOL = ("node", "content")
TENANT = ("tenant",)

UP, AGE = "arbiter_up", "arbiter_answer_age_seconds"


def _gauge(name: str, unit: str, labels: tuple[str, ...], text: str) -> Metric:
    return Metric(f"arbiter_{name}", MetricType.GAUGE, unit, labels, text)


def _counter(name: str, unit: str, labels: tuple[str, ...], text: str) -> Metric:
    return Metric(f"arbiter_{name}_total", MetricType.COUNTER, unit, labels, text)


def _seconds(name: str, labels: tuple[str, ...], text: str) -> Metric:
    return Metric(
        f"arbiter_{name}_seconds", MetricType.HISTOGRAM, "seconds", labels, text, SECONDS_BOUNDS
    )


def _ratio(name: str, labels: tuple[str, ...], text: str) -> Metric:
    return Metric(
        f"arbiter_{name}_ratio", MetricType.HISTOGRAM, "ratio", labels, text, RATIO_BOUNDS
    )


FRONT = (
    _gauge("up", "", (), "Whether the arbiter answered this scrape."),
    _gauge("answer_age_seconds", "seconds", (), "Age of the arbiter's answer that is shown."),
)
ARBITER = (
    _gauge("epoch", "", (), "Number of this life of the arbiter."),
    _gauge("holders", "", CAPABILITY, "Processes that hold tickets or may ask for them."),
    _gauge("quarantined_bytes", "bytes", ("node",), "Bytes that quarantined holders keep."),
    _counter("stale_messages", "", (), "Messages about tickets that had moved on."),
    _counter("calls", "", (), "Messages received from holders and node agents."),
    _counter("events", "", ("kind",), "Lines of the event log."),
)
DEVICES = (
    _gauge("device_state_bytes", "bytes", (*DEVICE, "state"), "Budget by what it is used for."),
    _gauge("device_capacity_bytes", "bytes", DEVICE, "What the device has."),
    _gauge("device_budget_bytes", "bytes", DEVICE, "What may be lent."),
    _gauge("device_charged_bytes", "bytes", DEVICE, "Larger of granted and measured, summed up."),
    _gauge("device_granted_bytes", "bytes", DEVICE, "Granted to tickets."),
    _gauge("device_measured_bytes", "bytes", DEVICE, "Held by engines on the books, as read."),
    _gauge("device_physical_free_bytes", "bytes", DEVICE, "Free as kernel or driver says."),
    _gauge("device_pressure_level", "", DEVICE, "0 nominal, 1 low, 2 critical."),
    _gauge("device_readable", "", DEVICE, "Whether the driver answers."),
    _gauge("device_loading_ratio", "ratio", DEVICE, "Share of ten minutes spent loading."),
    _gauge(
        "node_stalled_ratio", "ratio", ("node",), "Share of 10 s in which tasks lack RAM (PSI)."
    ),
    _counter("pressure_changes", "", ("level", "source"), "Changes of a device's pressure."),
)
MODELS = (
    _gauge(
        "model_state",
        "",
        MODEL,
        "0 cold, 1 queued, 2 loading, 3 asleep, 4 draining, 5 resident: the best of its tickets.",
    ),
    _gauge("model_charged_bytes", "bytes", MODEL, "Charged to its tickets on all devices."),
    _gauge("model_inflight_requests", "", MODEL, "Requests in flight, by the last heartbeat."),
)
QUEUE = (
    _gauge("queued_tickets", "", CAPABILITY, "Tickets that wait for a grant."),
    _gauge("queue_oldest_seconds", "seconds", (), "Longest wait in the queue; 0 when empty."),
    _gauge("queue_deadline_seconds", "seconds", (), "Least time left to a deadline; else +Inf."),
    _seconds("ticket_wait", CAPABILITY, "From a ticket's request to its grant."),
    _counter("tickets_refused", "", ("code",), "Refusals by the code that the client gets."),
    _seconds("request", (*CAPABILITY, "outcome"), "Requests, the wait for a load included."),
)
LOADS = (
    _seconds("load", CAPABILITY, "Loads from grant to first use."),
    _seconds("wake", CAPABILITY, "Wakes from grant to first use."),
    _seconds("unload", (*CAPABILITY, "to"), "From the last change of state to asleep or gone."),
    _counter("load_failures", "", CAPABILITY, "Loads that failed."),
    _counter("unloads", "", ("reason",), "Models that left or fell asleep."),
    _counter("evictions", "", ("reason",), "Victims asked to leave."),
    _counter("evicted_bytes", "bytes", ("reason",), "Bytes that victims were charged."),
    _counter("reload_seconds", "seconds", CAPABILITY, "Loads and wakes of models evicted before."),
    _ratio("estimate", CAPABILITY, "Measured peak of a load by the bytes granted to it."),
    _ratio("load_time", CAPABILITY, "Time of a load by the time predicted."),
)
POLICY = ("policy",)  # chosen: the one in force; lru; belady: foresight
REPLAYS = (
    _gauge("replay_span_seconds", "seconds", (), "Time whose demand is replayed, a day at most."),
    _gauge("replay_loading_seconds", "seconds", POLICY, "Its loads and wakes under a policy."),
    _gauge("replay_waited_seconds", "seconds", POLICY, "What its requests wait under a policy."),
    _gauge("replay_moved_bytes", "bytes", POLICY, "What its loads and wakes move to devices."),
)
POOLS = (
    _gauge("pool_bytes", "bytes", POOL, "RAM of the slabs, or of shared copies."),
    _gauge("pool_rows", "", POOL, "Rows that are ready."),
    _gauge("pool_hot_rows", "", POOL, "Rows in engines' slots now."),
    _counter("pool_hits", "", POOL, "Lookups that found a row."),
    _counter("pool_hot_hits", "", POOL, "Requests that found theirs in a slot: no lookup."),
    _counter("pool_misses", "", POOL, "Lookups that found none."),
    _counter("pool_stored", "", POOL, "Rows stored."),
    _counter("pool_evicted", "", POOL, "Rows evicted."),
    _counter("pool_refused", "", POOL, "Rows that found no room."),
    _counter("pool_restored", "", POOL, "Rows that came back from a file."),
    _counter("pool_saves", "", POOL, "Slabs that went to a file."),
    _counter("pool_load_seconds", "seconds", POOL, "Time rows were on their way to an engine."),
    _counter("pool_restore_seconds", "seconds", POOL, "Time rows were read from a file."),
)
TENANTS = (
    _gauge("tenant_held_bytes", "bytes", TENANT, "Held now, of a tenant with limits."),
    _gauge("tenant_limit_bytes", "bytes", TENANT, "The most it may hold; +Inf: no such limit."),
    _gauge("tenant_reserved_bytes", "bytes", TENANT, "Kept for it on each device."),
    _gauge("leases", "", (), "Leases that hold."),
    _gauge("lease_bytes", "bytes", (), "Charged to leases on all devices."),
    _counter("leases_ended", "", ("reason",), "Leases that ended."),
)
REMOTE = ("remote", "tenant")
REMOTES = (
    _counter("remote_answers", "", ("remote", "outcome"), "Requests to remotes by their end."),
    _counter("remote_tokens", "", REMOTE, "Tokens of prompts and answers, as remotes count."),
    _counter("remote_sent_bytes", "bytes", REMOTE, "Bodies of requests that left."),
    _counter("remote_money", "", REMOTE, "Spent, in the currency of the operator's prices."),
)
JOB = ("kind", "state")
JOBS = (
    _gauge(
        "jobs", "", JOB, "Batches and jobs; those that have ended for as long as they are kept."
    ),
    _counter("jobs_ended", "", JOB, "Batches and jobs that have ended, by their last state."),
    _gauge("batch_lines", "", ("outcome",), "Lines of the batches that are kept."),
    _gauge(
        "job_bytes", "bytes", ("kind",), "Bodies of jobs, and files, in the folder of the jobs."
    ),
)

TABLE: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        *FRONT,
        *ARBITER,
        *DEVICES,
        *MODELS,
        *QUEUE,
        *LOADS,
        *REPLAYS,
        *POOLS,
        *TENANTS,
        *REMOTES,
        *JOBS,
    )
}
