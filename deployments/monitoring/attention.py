"""What needs a person's attention: one line each, with the numbers and what to do."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from arbiter.units import Bytes, human

WARNING, CRITICAL = "warning", "critical"
# Above the longest cold start of a model on one machine, a minute; a ticket that waits longer
# waits for another.
LONG_WAIT_S = 60.0
LOADING_MOST = 0.3  # of ten minutes: the default bound of the arbiter's own rule (C13)


@dataclass(frozen=True, slots=True)
class Alert:
    """Describes one thing that needs attention."""

    level: str  # critical or warning
    about: str  # a device, model, holder, ticket or tenant
    text: str


def alerts_of(state: Mapping[str, Any]) -> list[Alert]:
    """The worst first."""
    rules = (_arbiter, _devices, _holders, _cooldowns, _queue, _tenants)
    alerts = chain.from_iterable(rule(state) for rule in rules)
    return sorted(alerts, key=lambda alert: alert.level != CRITICAL)


def _arbiter(state: Mapping[str, Any]) -> Iterator[Alert]:
    if state["is_closing"]:
        yield Alert(CRITICAL, "arbiter", "The arbiter is shutting down and grants nothing more.")
    elif not state["is_settled"]:
        text = "The arbiter has restarted and waits at most 5 s for its holders before it grants."
        yield Alert(WARNING, "arbiter", text)


def _devices(state: Mapping[str, Any]) -> Iterator[Alert]:
    for row in state["devices"]:
        device, free = row["device"], row["free_bytes"]
        if row["unreadable"] is not None:
            text = f"{device} cannot be read ({row['unreadable']}); nothing is granted there."
            yield Alert(CRITICAL, device, f"{text} Look at its driver.")
        if free < 0:
            over = human(Bytes(-free))
            text = f"{device} is overcommitted by {over}; idle models leave as soon as they may."
            yield Alert(WARNING, device, text)
        if row["pressure"] != "nominal":
            yield _pressure(row)
        if row["loading_fraction"] > LOADING_MOST:
            share = f"{row['loading_fraction']:.0%} of the last ten minutes"
            text = f"{device} spent {share} loading; models trade places too often."
            yield Alert(WARNING, device, f"{text} Let fewer of them share it.")


def _pressure(row: Mapping[str, Any]) -> Alert:
    free = row["physical_free_bytes"]
    free_text = "" if free is None else f": {human(Bytes(free))} are physically free"
    level = CRITICAL if row["pressure"] == "critical" else WARNING
    text = f"Memory pressure on {row['device']} is {row['pressure']}{free_text}."
    return Alert(level, row["device"], f"{text} End what the arbiter does not know, or add memory.")


def _holders(state: Mapping[str, Any]) -> Iterator[Alert]:
    for row in state["holders"]:
        if row["kept_bytes"]:
            size = human(Bytes(row["kept_bytes"]))
            text = f"{row['holder']} is in quarantine: it did not give {size} back."
            yield Alert(CRITICAL, row["holder"], f"{text} End its process if it hangs.")


def _cooldowns(state: Mapping[str, Any]) -> Iterator[Alert]:
    for row in state["cooldowns"]:
        times = "once" if row["times"] == 1 else f"{row['times']} times"
        text = f"{row['model']} failed to load {times}: {row['cause']}."
        again = f"It is tried again in {row['left_s']:.0f} s at the earliest."
        yield Alert(WARNING, row["model"], f"{text} {again}")


def _queue(state: Mapping[str, Any]) -> Iterator[Alert]:
    for row in state["queue"]:
        expected, left_s, waited = row["predicted_s"], row["left_s"], row["waited_s"]
        who = f"{row['model']} ({row['ticket']})"
        if expected is not None and left_s is not None and expected > left_s:
            text = f"{who} is expected in {expected:.0f} s, after its deadline in {left_s:.0f} s."
            yield Alert(WARNING, row["ticket"], text)
        elif waited > LONG_WAIT_S:
            text = f"{who} has waited {waited:.0f} s; explain says for what."
            yield Alert(WARNING, row["ticket"], text)


def _tenants(state: Mapping[str, Any]) -> Iterator[Alert]:
    for row in state["tenants"]:
        if row["is_cooling"]:
            text = f"{row['tenant']} held more than its average allows, and waits until that falls."
            yield Alert(WARNING, row["tenant"], text)
