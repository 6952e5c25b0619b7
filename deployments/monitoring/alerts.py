"""The thirteen alert rules, each with the command that says more (K2)."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Alert:
    """Describes one rule of Prometheus."""

    name: str
    promql: str
    lasts: str  # how long it must hold, as Prometheus writes it
    severity: str  # critical: requests fail; warning: they wait, or soon will
    summary: str
    runbook: str  # names the `arbiter` command to begin with


ALERTS = (
    Alert(
        "ArbiterAway",
        "(max(arbiter_up) or vector(0)) == 0",
        "1m",
        "critical",
        "No front reaches the arbiter; nothing is loaded or evicted.",
        "`arbiter check` on the configuration, then `serve status`; Ray restarts the actor.",
    ),
    Alert(
        "ArbiterRestarts",
        "changes(arbiter_epoch[15m]) > 3",
        "0m",
        "warning",
        "The arbiter began {{ $value }} new epochs in 15 minutes.",
        "`arbiter events` shows each start; the log of Ray's actor has the cause.",
    ),
    Alert(
        "DeviceOvercommitted",
        'arbiter_device_state_bytes{state="free"} < 0',
        "2m",
        "warning",
        "{{ $labels.device }} holds {{ $value }} bytes more than it may lend.",
        "`arbiter status` shows what is foreign; `arbiter unload MODEL` makes room.",
    ),
    Alert(
        "DeviceUnreadable",
        "arbiter_device_readable == 0",
        "1m",
        "critical",
        "The driver of {{ $labels.device }} does not answer; nothing more is lent from it.",
        "`arbiter status` shows the driver's words.",
    ),
    Alert(
        "MemoryPressureCritical",
        "arbiter_device_pressure_level == 2",
        "1m",
        "critical",
        "{{ $labels.device }} has been short of real memory for a minute.",
        "`arbiter events` shows what was freed; `arbiter free` frees more.",
    ),
    Alert(
        "MeasuredAboveGranted",
        "arbiter_device_measured_bytes > 1.05 * arbiter_device_granted_bytes",
        "5m",
        "warning",
        "Engines on {{ $labels.device }} hold more than they were granted.",
        "`arbiter compact` frees and reloads what holds too much.",
    ),
    Alert(
        "QueueStands",
        "arbiter_queue_oldest_seconds > 120",
        "1m",
        "warning",
        "A ticket has waited for {{ $value }} seconds.",
        "`arbiter status` names the ticket, `arbiter explain TICKET` says why it waits.",
    ),
    Alert(
        "DeadlinesMissed",
        'rate(arbiter_tickets_refused_total{code="deadline_unmet"}[5m]) > 0',
        "5m",
        "warning",
        "Requests are refused because they cannot be served by their deadline.",
        "`arbiter plan MODEL` says what a load would bring about now.",
    ),
    Alert(
        "LoadsFail",
        "increase(arbiter_load_failures_total[10m]) > 2",
        "0m",
        "critical",
        "{{ $value }} loads of {{ $labels.capability }} failed in ten minutes.",
        "`arbiter status` lists the models that cool down, with the cause.",
    ),
    Alert(
        "Thrashing",
        "arbiter_device_loading_ratio > 0.5",
        "10m",
        "warning",
        "{{ $labels.device }} spends {{ $value | humanizePercentage }} of its time loading.",
        "`arbiter residency` shows who takes turns; `arbiter floor` keeps one of them in.",
    ),
    Alert(
        "MemoryKeptByTheDead",
        "arbiter_quarantined_bytes > 0",
        "2m",
        "critical",
        "{{ $value }} bytes on {{ $labels.node }} have not come back from an engine that ended.",
        "`arbiter events` shows the quarantine; `arbiter status` shows the holder.",
    ),
    Alert(
        "EstimatesTooLow",
        "histogram_quantile(0.9, sum by (le, capability)"
        " (rate(arbiter_estimate_ratio_bucket[1h]))) > 1.25",
        "30m",
        "warning",
        "Models of {{ $labels.capability }} take more than they are granted.",
        "`arbiter events` has the estimate errors; `arbiter check` shows what is planned for each.",
    ),
    Alert(
        "StateNotKept",
        'increase(arbiter_events_total{kind="state_not_kept"}[10m]) > 0',
        "0m",
        "warning",
        "The arbiter cannot write its state; a restart would forget what it has learned.",
        "`arbiter events` has the cause, mostly a full disk.",
    ),
)


def rules() -> dict[str, Any]:
    """Returns the rules as a file of Prometheus holds them."""
    return {
        "groups": [
            {
                "name": "serve-arbiter",
                "rules": [
                    {
                        "alert": alert.name,
                        "expr": alert.promql,
                        "for": alert.lasts,
                        "labels": {"severity": alert.severity},
                        "annotations": {"summary": alert.summary, "runbook": alert.runbook},
                    }
                    for alert in ALERTS
                ],
            }
        ]
    }
