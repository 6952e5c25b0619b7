"""Tells of pre-warmed prefixes, and passes on that a person begins to speak (G1, G6).

What a person says goes next to the models behind voice activity detection in a declared
pipeline. The resident ones warm their stable prefixes while the words are still being spoken; the
others are the business of `prefetch`.
"""

from arbiter.core import events as ev
from arbiter.core.decisions import EventKind, LogEvent, WarmPrefixes
from arbiter.core.records.ticket import State
from arbiter.core.state import CoreState


def on_prewarmed(state: CoreState, event: ev.Prewarmed) -> None:
    """Writes a line of the event log. Nothing else follows from it (G6)."""
    holder = state.holders.get(event.holder)
    data: dict[str, str | int | float | bool | None] = {
        "holder": event.holder,
        "capability": holder.capability if holder else "",
        "model": event.model,
        "prefix": event.prefix,
        "cause": event.cause,
        "outcome": event.outcome,
        "prompt_tokens": event.prompt_tokens_count,
        "cached_tokens": event.cached_tokens_count,
    }
    state.decide(LogEvent(EventKind.PREWARM, data, event.ticket, took=event.took))


def on_speech(state: CoreState, event: ev.SpeechStarted) -> None:
    """Has the resident models of later stages warmed, on all nodes: the words may go to any."""
    holder = state.holders.get(event.holder)
    if holder is None:
        state.stale_count += 1
        return
    later = {
        stage
        for pipeline in state.settings.pipelines
        if holder.capability in pipeline
        for stage in pipeline[pipeline.index(holder.capability) + 1 :]
    }
    for ticket in state.ledger.tickets(State.RESIDENT):
        if ticket.model_name.capability in later and not ticket.lease:
            state.decide(WarmPrefixes(ticket.id, ticket.holder))
