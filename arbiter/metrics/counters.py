"""Counts what the event log says (K2): mostly decisions of the core, so that a recording counts the
same when it is replayed.
"""

from collections import Counter
from itertools import product
from typing import Any

from arbiter import errors
from arbiter.core.decisions import EventKind, LogEvent, Reason
from arbiter.core.histogram import Histogram
from arbiter.core.types import LEASE
from arbiter.metrics.series import Labels
from arbiter.metrics.table import TABLE, MetricType
from arbiter.units import in_seconds

JOB_KINDS = ("batch", "async", "response")
JOBS_OPEN = {
    kind: ("queued", "in_progress", "cancelling") for kind in JOB_KINDS if kind != "batch"
} | {"batch": ("validating", "in_progress", "finalizing", "cancelling")}
JOB_ENDS = ("completed", "failed", "cancelled", "expired")
_REASONS = tuple(reason.value for reason in Reason)
KNOWN = {
    "arbiter_events_total": tuple(kind.value for kind in EventKind),
    "arbiter_unloads_total": _REASONS,
    "arbiter_evictions_total": _REASONS,
    "arbiter_evicted_bytes_total": _REASONS,
    "arbiter_leases_ended_total": _REASONS,
    "arbiter_tickets_refused_total": tuple(
        sorted(
            error.code
            for error in vars(errors).values()
            if isinstance(error, type) and issubclass(error, errors.RequestError)
        )
    ),
}
LOADS = {
    EventKind.MODEL_LOAD: "arbiter_load_seconds",
    EventKind.MODEL_WAKE: "arbiter_wake_seconds",
}


class Counters:
    """Keeps one life's counters and histograms: by name of the table, then by labels."""

    def __init__(self) -> None:
        counted = [m.name for m in TABLE.values() if m.kind is MetricType.COUNTER]
        self.counts: dict[str, Counter[Labels]] = {name: Counter() for name in counted}
        self.histograms: dict[str, dict[Labels, Histogram]] = {
            m.name: {} for m in TABLE.values() if m.kind is MetricType.HISTOGRAM
        }
        # Models out since their eviction; as many as there are models at most.
        self._evicted: set[tuple[str, str]] = set()
        # A counter that begins with its first event would hide that event: Prometheus sees no
        # increase without a value before it.
        for name, labels in KNOWN.items():
            self.counts[name].update(dict.fromkeys(((label,) for label in labels), 0))
        ends = dict.fromkeys(product(JOB_KINDS, JOB_ENDS), 0)
        self.counts["arbiter_jobs_ended_total"].update(ends)

    def note(self, event: LogEvent) -> None:
        """Counts one line of the event log."""
        self._count("events", event.kind.value)
        data = event.data
        match event.kind:
            case EventKind.TICKET_GRANTED:
                self._took("arbiter_ticket_wait_seconds", event, str(data["capability"]))
            case EventKind.TICKET_REFUSED:
                self._count("tickets_refused", str(data["code"]))
            case EventKind.LOAD_FAILED:
                self._count("load_failures", str(data["capability"]))
            case EventKind.LEASE_ENDED:
                self._count("leases_ended", str(data["reason"]))
            case EventKind.MEMORY_PRESSURE:
                self._count("pressure_changes", str(data["level"]), str(data["source"]))
            case EventKind.JOB_ENDED:
                self._count("jobs_ended", str(data["job_kind"]), str(data["state"]))
            case EventKind.REMOTE_EGRESS | EventKind.REMOTE_ANSWER:
                self._note_remote(data)
            case _:
                self._note_model(event, data)

    def _note_model(self, event: LogEvent, data: dict[str, Any]) -> None:
        match event.kind:
            case EventKind.MODEL_LOAD | EventKind.MODEL_WAKE:
                self._note_load(event, data)
            case EventKind.MODEL_UNLOAD:
                self._count("unloads", data["reason"])
                self._took("arbiter_unload_seconds", event, data["capability"], data["to"])
            case EventKind.EVICTION:
                self._count("evictions", data["reason"])
                self._count("evicted_bytes", data["reason"], by=event.size_bytes or 0)
                if data["capability"] != LEASE:  # what its client called it never loads again
                    self._evicted.add((data["capability"], data["model"]))
            case EventKind.ESTIMATE_ERROR:
                self._note_estimate(event, data)

    def _note_remote(self, data: dict[str, Any]) -> None:
        """Counts a request that left for a remote: its start begins the series, and its end
        counts."""
        if outcome := data.get("outcome"):
            self._count("remote_answers", data["remote"], outcome)
        whose = data["remote"], data["tenant"]
        tokens = data.get("prompt_tokens", 0) + data.get("answer_tokens", 0)
        self._count("remote_tokens", *whose, by=tokens)
        self._count("remote_sent_bytes", *whose, by=data.get("sent_bytes", 0))
        self._count("remote_money", *whose, by=data.get("money", 0))

    def _note_load(self, event: LogEvent, data: dict[str, Any]) -> None:
        capability = data["capability"]
        self._took(LOADS[event.kind], event, capability)
        name = capability, data["model"]
        if name in self._evicted and event.took is not None:
            self._evicted.remove(name)
            self._count("reload_seconds", capability, by=in_seconds(event.took))

    def _note_estimate(self, event: LogEvent, data: dict[str, Any]) -> None:
        """Counts how far off an estimate was: the event says what a load took and by how much that
        differs from what was expected."""
        peak, capability = event.size_bytes or 0, data["capability"]
        granted = peak - data["error_bytes"]
        if granted > 0:
            self._observe("arbiter_estimate_ratio", peak / granted, capability)
        if event.took is not None and data["error_ns"] is not None:
            predicted = event.took - data["error_ns"]
            if predicted > 0:
                self._observe("arbiter_load_time_ratio", event.took / predicted, capability)

    def _took(self, name: str, event: LogEvent, *labels: str) -> None:
        if event.took is not None:
            self._observe(name, in_seconds(event.took), *labels)

    def _count(self, name: str, *labels: str, by: float = 1) -> None:
        self.counts[f"arbiter_{name}_total"][labels] += by  # type: ignore[assignment]

    def _observe(self, name: str, value: float, *labels: str) -> None:
        histograms = self.histograms[name]
        if labels not in histograms:
            histograms[labels] = Histogram(TABLE[name].bounds)
        histograms[labels].note(value)
