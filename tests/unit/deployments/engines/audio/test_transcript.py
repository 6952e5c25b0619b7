"""Pieces of a long sound, and the formats of a transcript."""

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from deployments.engines.audio import hearing, transcript
from deployments.engines.audio.sound import HEARD_HZ, PART
from deployments.engines.audio.transcript import WRITE, Transcript, TranscriptionRequest

SECOND = HEARD_HZ


@dataclass
class Word:
    start: float
    end: float
    word: str
    probability: float = 1.0


@dataclass
class Segment:
    start: float
    end: float
    text: str
    id: int = 0
    seek: int = 0
    words: list[Word] = field(default_factory=list)


def transcribed(**more: Any) -> Transcript:
    asked = TranscriptionRequest(
        "transcribe", "json", None, None, (0.0,), frozenset(), False, False
    )
    asked = transcript.TranscriptionRequest(
        **{name: getattr(asked, name) for name in asked.__slots__} | more
    )
    said = Transcript(asked, 4_000 * SECOND)
    said.language = "en"
    said.segments = [
        Segment(0.0, 1.5, " One,", words=[Word(0.0, 0.5, " One,")]),
        Segment(3_661.25, 3_662.0, " two."),
    ]
    return said


def pieces(samples: np.ndarray, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Begin and end of each, whose samples are those of that place in the file."""
    parts = np.split(samples, range(PART, len(samples), PART))
    found = list(hearing.pieces(parts, spans))
    assert all(np.array_equal(samples[b : b + len(piece)], piece) for b, piece in found)
    return [(begin, begin + len(piece)) for begin, piece in found]


def test_pieces_are_cut_where_it_is_quiet_and_miss_nothing() -> None:
    loud = np.full(150 * SECOND, 1_000, np.int16)
    loud[int(50.1 * SECOND) : int(50.5 * SECOND)] = 1
    loud[100 * SECOND : int(100.4 * SECOND)] = 1
    cut = pieces(loud, [(0, len(loud))])
    assert [begin for begin, _ in cut[1:]] == [end for _, end in cut[:-1]]
    assert (cut[0][0], cut[-1][1]) == (0, len(loud))
    first, second = (end / SECOND for _, end in cut[:-1])
    assert 50.1 < first < 50.5 and 100.0 < second < 100.4
    assert all(end - begin <= 60 * SECOND for begin, end in cut)


def test_sound_without_a_quiet_place_is_cut_all_the_same() -> None:
    loud = np.full(200 * SECOND, 1_000, np.int16)
    assert all(e - b <= 60 * SECOND for b, e in pieces(loud, [(0, len(loud))]))
    assert pieces(loud, []) == []


def test_spans_with_a_short_pause_between_them_are_heard_together() -> None:
    spans = [(0, SECOND), (2 * SECOND, 3 * SECOND), (6 * SECOND, 7 * SECOND)]
    assert hearing.joined(spans) == [(0, 3 * SECOND), (6 * SECOND, 7 * SECOND)]
    assert hearing.joined([]) == []


@pytest.mark.spec("H3", "J1")
def test_subtitles_count_hours() -> None:
    srt = WRITE["srt"](transcribed())[1]
    assert srt == (
        "1\n00:00:00,000 --> 00:00:01,500\nOne,\n\n2\n01:01:01,250 --> 01:01:02,000\ntwo.\n"
    )
    vtt = WRITE["vtt"](transcribed())[1]
    assert vtt.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne,\n\n01:01:01.250")


@pytest.mark.spec("H3", "J1")
def test_verbose_json_has_what_was_asked_for() -> None:
    words = json.loads(WRITE["verbose_json"](transcribed(granularities=frozenset({"word"})))[1])
    assert words["words"] == [{"word": "One,", "start": 0.0, "end": 0.5}]
    assert "segments" not in words
    assert (words["text"], words["language"], words["duration"]) == ("One, two.", "en", 4_000.0)
    both = json.loads(WRITE["verbose_json"](transcribed())[1])
    assert "words" not in both and "words" not in both["segments"][0]


async def test_turns_without_a_segment_are_no_events() -> None:
    said = transcribed()

    async def heard() -> Any:
        for segment in (None, *said.segments, None):
            yield segment

    *deltas, done = [event async for event in transcript.events(said, heard())]
    assert [event["delta"] for event in deltas] == ["One,", " two."]
    assert done["text"] == "One, two."
