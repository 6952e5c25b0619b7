"""The values of one scrape: the state as it is, and the counters so far (K2)."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from arbiter.core.histogram import Histogram, HistogramCounts
from arbiter.core.reports.snapshot import DeviceView, StateView, TicketView
from arbiter.core.types import Level, ModelName
from arbiter.metrics.counters import JOB_ENDS, JOBS_OPEN, Counters
from arbiter.metrics.series import Labels, Samples, Value
from arbiter.metrics.table import CAPABILITY, TABLE, MetricType
from arbiter.replay.score import ReplayedDay
from arbiter.units import DeviceId, in_seconds

# Best last: a model with several tickets shows the best of them.
STATES = ("cold", "queued", "loading", "asleep", "draining", "resident")
RANKS = {state: rank for rank, state in enumerate(STATES)}
HOLDING = ("loading", "resident", "draining", "asleep", "reclaiming")
INFINITY = float("inf")
FILE = "file"  # the kind of what is no job: an upload, or the results of a batch that has ended
BATCH = "batch"


@dataclass(frozen=True, slots=True)
class JobTotal:
    """Sums up the batches, jobs or files of one kind in one state, as the state file has them."""

    kind: str  # batch, async, response or file
    state: str
    rows_count: int
    size_bytes: int  # of bodies
    done_count: int  # lines of batches
    failed_count: int
    total_count: int


@dataclass(frozen=True, slots=True)
class Source:
    """Gives what a scrape is made from."""

    view: StateView
    counters: Counters
    models: tuple[ModelName, ...]  # all that there are
    request_times: Mapping[tuple[str, str], HistogramCounts] = field(default_factory=dict)
    calls_count: int = 0
    day: ReplayedDay | None = None  # None: not replayed yet
    jobs: tuple[JobTotal, ...] = ()


def samples_of(source: Source) -> Samples:
    """Returns a value for each series; a name without a series has none."""
    samples: Samples = {name: {} for name in TABLE}
    for name, counts in source.counters.counts.items():
        samples[name].update(counts)
    for name, histograms in source.counters.histograms.items():
        samples[name].update({labels: h.read() for labels, h in histograms.items()})
    _begin_at_zero(samples, source)
    _put(samples, "arbiter_request_seconds", source.request_times.items())
    _arbiter(samples, source)
    held = _held_on(source.view.tickets)
    for device in source.view.devices:
        _device(samples, device, held[device.device])
    _models(samples, source)
    _queue(samples, source)
    _pools(samples, source.view)
    _tenants(samples, source.view)
    _jobs(samples, source.jobs)
    if source.day is not None:
        _replayed(samples, source.day)
    return samples


def _begin_at_zero(samples: Samples, source: Source) -> None:
    """Gives what is counted by capability a value before its first event, as in
    `counters.KNOWN`."""
    labels = [(capability,) for capability in _capabilities(source)]
    for metric in TABLE.values():
        if metric.labels == CAPABILITY and metric.kind is not MetricType.GAUGE:
            is_histogram = metric.kind is MetricType.HISTOGRAM
            zero: Value = Histogram(metric.bounds).read() if is_histogram else 0
            for each in labels:
                samples[metric.name].setdefault(each, zero)


def _put(samples: Samples, name: str, rows: Iterable[tuple[Labels, Value]]) -> None:
    for labels, value in rows:
        samples[name][labels] = value


def _arbiter(samples: Samples, source: Source) -> None:
    view = source.view
    samples["arbiter_epoch"][()] = int(view.epoch)
    samples["arbiter_stale_messages_total"][()] = view.stale_count
    samples["arbiter_calls_total"][()] = source.calls_count
    holders = Counter({(name,): 0 for name in _capabilities(source)})
    holders.update((h.capability,) for h in view.holders)
    _put(samples, "arbiter_holders", holders.items())
    quarantined = Counter({(device.node,): 0 for device in view.devices})
    for holder in view.holders:
        quarantined[(holder.node,)] += holder.kept_bytes
    _put(samples, "arbiter_quarantined_bytes", quarantined.items())
    stalled = {(node,): 0.0 for (node,) in quarantined}
    for device in view.devices:
        stalled[(device.node,)] = max(stalled[(device.node,)], device.stalled_fraction)
    _put(samples, "arbiter_node_stalled_ratio", stalled.items())


def _capabilities(source: Source) -> set[str]:
    return {name.capability for name in source.models}


@dataclass(slots=True)
class _Held:
    """Sums up the tickets of one device."""

    by_state: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(HOLDING, 0)))
    granted_bytes: int = 0


def _held_on(tickets: Iterable[TicketView]) -> defaultdict[DeviceId, _Held]:
    samples: defaultdict[DeviceId, _Held] = defaultdict(_Held)
    for ticket in tickets:
        for part in ticket.charged:
            samples[part.device].by_state[ticket.state] += part.size_bytes
        for part in ticket.granted:
            samples[part.device].granted_bytes += part.size_bytes
    return samples


def _device(samples: Samples, device: DeviceView, held: _Held) -> None:
    labels = device.node, device.device
    known_bytes = sum(held.by_state.values())
    states: dict[str, float] = {
        **held.by_state,
        "shared": device.charged_bytes - known_bytes,  # the scratch of dispatch locks
        "foreign": device.foreign_bytes,
        "free": device.free_bytes,
    }
    for state, size in states.items():
        samples["arbiter_device_state_bytes"][(*labels, state)] = size
    values = {
        "capacity_bytes": device.capacity_bytes,
        "budget_bytes": device.budget_bytes,
        "charged_bytes": device.charged_bytes,
        "granted_bytes": held.granted_bytes,
        "measured_bytes": device.measured_bytes,
        "pressure_level": Level[device.pressure.upper()],
        "readable": device.unreadable is None,
        "loading_ratio": device.loading_fraction,
    }
    for name, value in values.items():
        samples[f"arbiter_device_{name}"][labels] = float(value)
    if device.physical_free_bytes is not None:
        samples["arbiter_device_physical_free_bytes"][labels] = device.physical_free_bytes


def _models(samples: Samples, source: Source) -> None:
    """Returns the samples of models. A model that is cold keeps its series; a model that has left
    the table, and its tickets, have none."""
    state = dict.fromkeys(source.models, 0)
    charged, inflight = dict.fromkeys(source.models, 0), dict.fromkeys(source.models, 0)
    for ticket in source.view.tickets:
        name = ModelName(ticket.capability, ticket.model)
        if ticket.lease or name not in state:
            continue
        state[name] = max(state[name], RANKS.get(ticket.state, 0))
        charged[name] += sum(part.size_bytes for part in ticket.charged)
        inflight[name] += ticket.inflight
    _put(samples, "arbiter_model_state", state.items())
    _put(samples, "arbiter_model_charged_bytes", charged.items())
    _put(samples, "arbiter_model_inflight_requests", inflight.items())


def _queue(samples: Samples, source: Source) -> None:
    queue = source.view.queue
    queued = Counter({(name,): 0 for name in _capabilities(source)})
    queued.update((row.capability,) for row in queue)
    _put(samples, "arbiter_queued_tickets", queued.items())
    oldest = max((in_seconds(row.waited) for row in queue), default=0.0)
    samples["arbiter_queue_oldest_seconds"][()] = oldest
    remaining_s = (in_seconds(row.left) for row in queue if row.left is not None)
    samples["arbiter_queue_deadline_seconds"][()] = min(remaining_s, default=INFINITY)


def _pools(samples: Samples, view: StateView) -> None:
    hot: Counter[Labels] = Counter()
    for row in view.slabs:
        hot[(row.node, row.slab.content.value)] += row.slab.hot_count
    for pool in view.contents:
        content, labels = pool.content, (pool.node, pool.content.content.value)
        values = {
            "bytes": content.allocated_bytes,
            "rows": content.rows_count,
            "hot_rows": hot[labels],
            "hits_total": content.hits_count,
            "hot_hits_total": content.hot_hits_count,
            "misses_total": content.misses_count,
            "stored_total": content.stored_count,
            "evicted_total": content.evicted_count,
            "refused_total": content.refused_count,
            "restored_total": content.restored_count,
            "saves_total": content.saves_count,
            "load_seconds_total": in_seconds(content.load),
            "restore_seconds_total": in_seconds(content.restore),
        }
        for name, value in values.items():
            samples[f"arbiter_pool_{name}"][labels] = value


def _tenants(samples: Samples, view: StateView) -> None:
    for tenant in view.tenants:
        labels = (tenant.tenant,)
        most = INFINITY if tenant.most_bytes is None else tenant.most_bytes
        samples["arbiter_tenant_held_bytes"][labels] = tenant.held_bytes
        samples["arbiter_tenant_limit_bytes"][labels] = most
        samples["arbiter_tenant_reserved_bytes"][labels] = tenant.reserved_bytes
    leases = (t for t in view.tickets if t.lease and not t.lease.on_host)
    held = [t for t in leases if t.state != "queued"]
    samples["arbiter_leases"][()] = len(held)
    charged = sum(part.size_bytes for ticket in held for part in ticket.charged)
    samples["arbiter_lease_bytes"][()] = charged


def _jobs(samples: Samples, totals: Iterable[JobTotal]) -> None:
    """Returns the samples of jobs. Every kind and state has its series from the start."""
    states = {(kind, s): 0 for kind, opened in JOBS_OPEN.items() for s in (*opened, *JOB_ENDS)}
    _put(samples, "arbiter_jobs", states.items())
    lines = Counter({("done",): 0, ("failed",): 0, ("left",): 0})
    size_bytes = Counter({(kind,): 0 for kind in (*JOBS_OPEN, FILE)})
    for row in totals:
        size_bytes[(row.kind,)] += row.size_bytes
        if row.kind != FILE:
            samples["arbiter_jobs"][(row.kind, row.state)] = row.rows_count
        lines[("done",)] += row.done_count
        lines[("failed",)] += row.failed_count
        if row.state in JOBS_OPEN[BATCH]:
            lines[("left",)] += row.total_count - row.done_count - row.failed_count
    _put(samples, "arbiter_batch_lines", lines.items())
    _put(samples, "arbiter_job_bytes", size_bytes.items())


def _replayed(samples: Samples, day: ReplayedDay) -> None:
    samples["arbiter_replay_span_seconds"][()] = in_seconds(day.span)
    for policy, score in day.scores.items():
        values = {
            "loading_seconds": in_seconds(score.loading),
            "waited_seconds": in_seconds(score.waited),
            "moved_bytes": score.moved_bytes,
        }
        for name, value in values.items():
            samples[f"arbiter_replay_{name}"][(policy,)] = value
