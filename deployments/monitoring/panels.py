"""The dashboard's twelve panels, and the Grafana dashboard that they make (K2)."""

import re
from dataclasses import dataclass
from typing import Any

from arbiter.metrics.samples import STATES

WIDTH, HEIGHT, COLUMNS = 12, 8, 2  # of a panel; Grafana's page is 24 wide


@dataclass(frozen=True, slots=True)
class Query:
    """Gives one line, or one for each of its labels, in PromQL."""

    promql: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """Describes one panel: what it shows, in which of Grafana's units."""

    title: str
    unit: str  # bytes, s, percentunit, short, ops
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    is_stacked: bool = False


def _p95(name: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile(0.95, sum by ({labels}) (rate({name}_bucket[5m])))"


def _regret(policy: str) -> str:
    """The loads that foresight (Belady) would have spared the last day, as a share of it."""
    name = "arbiter_replay_loading_seconds"
    spared = f'{name}{{policy="{policy}"}} - ignoring(policy) {name}{{policy="belady"}}'
    return f"({spared}) / ignoring(policy) arbiter_replay_span_seconds"


def _tier(name: str) -> str:
    """A share of the requests that named an adapter: found in a slot, in host RAM, or nowhere."""
    kinds = ("hot_hits", "hits", "misses")
    rates = " + ".join(f"sum(rate(arbiter_pool_{each}_total{ADAPTERS}[5m]))" for each in kinds)
    return f"sum(rate(arbiter_pool_{name}_total{ADAPTERS}[5m])) / ({rates})"


ADAPTERS = '{content="adapter"}'
PANELS = (
    Panel(
        "Bytes by state",
        "bytes",
        (Query("sum by (device, state) (arbiter_device_state_bytes)", "{{device}} {{state}}"),),
        is_stacked=True,
    ),
    Panel(
        "Measured minus granted",
        "bytes",
        (Query("arbiter_device_measured_bytes - arbiter_device_granted_bytes", "{{device}}"),),
    ),
    Panel(
        "Models over time",
        "short",
        (Query("arbiter_model_state > 0", "{{capability}}/{{model}}"),),
        kind="state-timeline",
    ),
    Panel(
        "Queue",
        "short",
        (
            Query("arbiter_queued_tickets", "{{capability}}"),
            Query("arbiter_model_inflight_requests > 0", "in flight: {{model}}"),
            Query(
                'arbiter_jobs{state!~"completed|failed|cancelled|expired"}', "{{kind}} {{state}}"
            ),
            Query('arbiter_batch_lines{outcome="left"}', "lines of batches {{outcome}}"),
        ),
    ),
    Panel(
        "Waits against deadlines",
        "s",
        (
            Query(_p95("arbiter_ticket_wait_seconds"), "wait, p95"),
            Query("arbiter_queue_oldest_seconds", "longest now"),
            Query("arbiter_queue_deadline_seconds < +Inf", "least left to a deadline"),
        ),
    ),
    Panel(
        "Seconds of loads, wakes and unloads, p95",
        "s",
        (
            Query(_p95("arbiter_load_seconds", "capability"), "load: {{capability}}"),
            Query(_p95("arbiter_wake_seconds", "capability"), "wake: {{capability}}"),
            Query(_p95("arbiter_unload_seconds", "to"), "unload: {{to}}"),
        ),
    ),
    Panel(
        "Evictions by reason",
        "ops",
        (Query("sum by (reason) (rate(arbiter_evictions_total[5m]))", "{{reason}}"),),
        is_stacked=True,
    ),
    Panel(
        "Share of the time spent on reloads, and regret over the last day",
        "percentunit",
        (
            Query("rate(arbiter_reload_seconds_total[5m])", "after evictions: {{capability}}"),
            Query("arbiter_device_loading_ratio", "all loads: {{device}}"),
            Query(_regret("chosen"), "replayed, beyond foresight: the policy in force"),
            Query(_regret("lru"), "replayed, beyond foresight: least recently used"),
        ),
    ),
    Panel(
        "Measured by granted, and load time by predicted, p95",
        "short",
        (
            Query(_p95("arbiter_estimate_ratio", "capability"), "bytes: {{capability}}"),
            Query(_p95("arbiter_load_time_ratio", "capability"), "seconds: {{capability}}"),
        ),
    ),
    Panel(
        "Free memory and pressure",
        "bytes",
        (
            Query("arbiter_device_physical_free_bytes", "free: {{device}}"),
            Query("arbiter_device_pressure_level > 0", "pressure: {{device}}"),
            Query("arbiter_node_stalled_ratio", "stalled for RAM: {{node}}"),
        ),
    ),
    Panel(
        "Adapters: tiers and hit rate",
        "short",
        (
            Query(f"sum by (node) (arbiter_pool_hot_rows{ADAPTERS})", "in slots: {{node}}"),
            Query(f"sum by (node) (arbiter_pool_rows{ADAPTERS})", "in host RAM: {{node}}"),
            Query(_tier("hot_hits"), "found in a slot"),
            Query(_tier("hits"), "found in host RAM"),
            Query(_tier("misses"), "read from disk"),
        ),
    ),
    Panel(
        "Tenants, leases and jobs",
        "bytes",
        (
            Query("arbiter_tenant_held_bytes", "{{tenant}}"),
            Query("arbiter_tenant_limit_bytes < +Inf", "limit of {{tenant}}"),
            Query("arbiter_lease_bytes", "leases"),
            Query("arbiter_job_bytes", "on the disk: {{kind}}"),
        ),
        is_stacked=False,
    ),
)
_OURS = re.compile(r"\barbiter_")
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard(*, uid: str = "serve-arbiter", prefix: str = "") -> dict[str, Any]:
    """Returns the dashboard as Grafana imports it. `prefix`: of our metrics' names where they are
    scraped; at the front they have none."""
    return {
        "uid": uid,
        "title": "Arbiter: device memory",
        "tags": ["serve-arbiter"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]
        },
        "panels": [_panel(number, panel, prefix) for number, panel in enumerate(PANELS)],
    }


def _panel(number: int, panel: Panel, prefix: str) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS)
    custom = {"stacking": {"mode": "normal"}, "fillOpacity": 40} if panel.is_stacked else {}
    return {
        "id": number + 1,
        "title": panel.title,
        "type": panel.kind,
        "datasource": DATASOURCE,
        "gridPos": {"x": WIDTH * column, "y": HEIGHT * row, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "custom": custom, "mappings": _mappings(panel)},
            "overrides": [],
        },
        "targets": [
            {
                "refId": chr(ord("A") + position),
                "datasource": DATASOURCE,
                "expr": _OURS.sub(prefix + "arbiter_", query.promql),
                "legendFormat": query.legend,
            }
            for position, query in enumerate(panel.queries)
        ],
    }


def _mappings(panel: Panel) -> list[dict[str, Any]]:
    """The numbers of a model's state as words."""
    if panel.kind != "state-timeline":
        return []
    return [{"type": "value", "options": {str(n): {"text": word} for n, word in enumerate(STATES)}}]
