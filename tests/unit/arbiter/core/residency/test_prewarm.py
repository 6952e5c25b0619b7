"""Speech warms the models behind it in a pipeline, and what was warmed is in the event log."""

from dataclasses import replace

import pytest

from arbiter.core import events as ev
from arbiter.core.decisions import LogEvent, WarmPrefixes
from arbiter.units import HolderId, NodeId, TicketId, seconds
from tests.support.core_driver import PLAIN, CoreDriver

SPOKEN = replace(PLAIN, pipelines=(("embedding", "text"),))
EAR = HolderId("k")


def driver() -> CoreDriver:
    """A resident text model, and a holder of the stage before it."""
    d = CoreDriver(settings=SPOKEN)
    d.at(0, ev.Joined(EAR, NodeId("n"), "embedding", ()))
    d.resident(0, "a", 30)
    return d


@pytest.mark.spec("G1")
def test_speech_warms_the_resident_models_of_later_stages() -> None:
    d = driver()
    decided = d.at(5, ev.SpeechStarted(EAR))
    assert decided == [WarmPrefixes(TicketId("a"), HolderId("h"))]


@pytest.mark.spec("G1", "G5")
def test_speech_loads_nothing_and_warms_no_earlier_stage() -> None:
    d = driver()
    assert d.at(5, ev.SpeechStarted(HolderId("h"))) == []
    d.at(6, ev.Released(TicketId("a"), "x"))
    d.gone(6, "a")
    assert d.at(7, ev.SpeechStarted(EAR)) == []


def test_speech_from_a_holder_that_is_not_known_is_stale() -> None:
    d = driver()
    before = d.arbiter.stale_count
    assert d.at(5, ev.SpeechStarted(HolderId("unknown"))) == []
    assert d.arbiter.stale_count == before + 1


@pytest.mark.spec("G6", "K1")
def test_prewarm_is_an_event_and_changes_nothing_else() -> None:
    d = driver()
    told = ev.Prewarmed(
        HolderId("h"), TicketId("a"), "a", "__system_prefix__", "load", "warmed", 300, 0, seconds(1)
    )
    before = d.snapshot()
    assert d.at(0, told) == []
    line: LogEvent = d.last("prewarm")
    assert (line.ticket, line.took) == (TicketId("a"), seconds(1))
    assert line.data == {
        "holder": "h",
        "capability": "text",
        "model": "a",
        "prefix": "__system_prefix__",
        "cause": "load",
        "outcome": "warmed",
        "prompt_tokens": 300,
        "cached_tokens": 0,
    }
    assert d.snapshot() == before
