"""The event log in sentences: what happened, to what, with the numbers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from arbiter.units import Bytes, human

KNOWN = {"seq", "kind", "unix_s", "epoch", "ticket", "size_bytes", "took_s", "holder"}
CAME, WENT, BAD, PLAIN = "came", "went", "bad", "plain"  # tones, of colour
TONES = {
    CAME: ("model_load", "model_wake", "ticket_granted", "lease_granted", "growth_granted"),
    WENT: ("model_unload", "eviction", "lease_ended", "model_compacted", "growth_given_back"),
    BAD: (
        "load_failed", "ticket_refused", "quarantine", "holder_lost", "node_lost", "node_silent",
        "device_lost", "device_unreadable", "unload_overdue", "revoke_unanswered", "agent_ended",
        "cool_down", "memory_pressure", "pressure_nothing_left", "barrier_dropped", "lease_overdue",
        "wake_unverified", "wake_given_up", "unload_refused", "unclaimed_engine",
    ),
}  # fmt: skip
TONE_OF = {kind: tone for tone, kinds in TONES.items() for kind in kinds}
# Changes of who holds memory, which a picture over time marks with their reasons.
MARKS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "model_load": lambda e: f"{e['model']} loads",
    "model_wake": lambda e: f"{e['model']} wakes",
    "model_unload": lambda e: f"{e['model']} {_went(e)}: {e['reason']}",
    "eviction": lambda e: f"{e['model']} evicted: {e['reason']}",
    "lease_granted": lambda e: f"lease {e['model']}",
    "lease_ended": lambda e: f"lease {e['model']} ends: {e['reason']}",
    "model_compacted": lambda e: f"{e['model']} compacted",
    "growth_granted": lambda e: f"{e['model']} grows",
    "load_failed": lambda e: f"{e['model']} fails to load",
    "arbiter_started": lambda e: "arbiter starts",
    "memory_pressure": lambda e: f"pressure {e['level']}",
}


@dataclass(frozen=True, slots=True)
class EventRow:
    """Describes one event."""

    seq: int
    unix_s: float
    kind: str
    tone: str  # came, went, bad or plain
    text: str
    ticket: str | None = None
    model: str = ""
    device: str = ""  # where the event names one
    mark: str | None = None  # on a picture over time; None: it changes nothing there


def event_row(event: Mapping[str, Any]) -> EventRow:
    """`event`: a line of the event log."""
    kind = event["kind"]
    mark = MARKS.get(kind)
    return EventRow(
        event["seq"],
        event["unix_s"],
        kind,
        TONE_OF.get(kind, PLAIN),
        _text(event),
        event.get("ticket"),
        event.get("model") or "",
        event.get("device") or "",
        mark(event) if mark else None,
    )


def _went(event: Mapping[str, Any]) -> str:
    return "falls asleep" if event.get("to") == "asleep" else "leaves"


def _job(event: Mapping[str, Any]) -> str:
    kind = {"batch": "batch", "async": "job"}.get(event["job_kind"], event["job_kind"])
    model = f" for {event['model']}" if event["model"] else ""
    return f"{kind} {event['job']} of {event['tenant']}{model}"


def _off(error_bytes: int) -> str:
    return f"{human(Bytes(abs(error_bytes)))} {'more' if error_bytes > 0 else 'less'}"


def _text(event: Mapping[str, Any]) -> str:
    sentence = SENTENCES.get(event["kind"])
    numbers = [human(Bytes(event["size_bytes"]))] if event.get("size_bytes") is not None else []
    numbers += [f"{event['took_s']:.2f} s"] if event.get("took_s") is not None else []
    if sentence:
        return ", ".join([sentence(event), *numbers])
    rest = (f"{k} {v}" for k, v in event.items() if k not in KNOWN and v not in (None, ""))
    return ", ".join([*rest, *numbers])


SENTENCES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "model_load": lambda e: f"{e['model']} has loaded",
    "model_wake": lambda e: f"{e['model']} has woken",
    "model_unload": lambda e: f"{e['model']} {_went(e)} ({e['reason']})",
    "eviction": lambda e: (
        f"{e['model']} is asked to leave ({e['reason']})"
        + (f" for {e['waiting']}" if e.get("waiting") else "")
    ),
    "ticket_queued": lambda e: f"{e['model']} joins the queue as number {e['position']}",
    "ticket_waits": lambda e: f"{e['model']} waits, as expected for",
    "ticket_granted": lambda e: f"{e['model']} is granted its memory",
    "ticket_raised": lambda e: f"{e['model']} waits with priority {e['priority']}, by hand",
    "ticket_refused": lambda e: f"refused: {e['cause']}",
    "load_failed": lambda e: f"{e['model']} failed to load: {e['cause']}",
    "estimate_error": lambda e: (
        f"{e['model']} took {_off(e['error_bytes'])} than estimated; it took"
    ),
    "ticket_rejoined": lambda e: f"{e['model']} is back on the books, {e['phase']}",
    "holder_joined": lambda e: f"a holder on {e['node']} joins with {e['tickets']} tickets",
    "cool_down": lambda e: f"{e['model']} cools down after {e['times']} failures: {e['cause']}",
    "lease_granted": lambda e: f"{e['tenant']} leases memory as {e['model']}",
    "lease_ended": lambda e: f"the lease {e['model']} ends ({e['reason']})",
    "quarantine": lambda e: f"{e['model']} keeps memory that it should give back",
    "memory_pressure": lambda e: f"pressure on {e['device']} is {e['level']} ({e['source']})",
    "capability_run": lambda e: f"{e.get('model', '')} has answered a request",
    "job_accepted": lambda e: f"{_job(e)} is accepted",
    "job_begun": lambda e: f"{_job(e)} begins, accepted before",
    "job_ended": lambda e: (
        f"{_job(e)} is {e['state']}: {e['done']} done and {e['failed']} failed of {e['total']}"
    ),
    "remote_egress": lambda e: (
        f"a request of {e['tenant']} leaves for {e['model']} at {e['remote']}"
    ),
    "remote_answer": lambda e: (
        f"{e['remote']}: {e['outcome']}, {e['prompt_tokens'] + e['answer_tokens']} tokens,"
        f" {e['money']:g} of {e['tenant']}'s budget"
    ),
}
