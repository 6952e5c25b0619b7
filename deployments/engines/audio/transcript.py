"""What was heard of a file, and how OpenAI's response formats write it."""

import json
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass
from typing import Any

from deployments.engines.audio.sound import HEARD_HZ


@dataclass(frozen=True, slots=True)
class TranscriptionRequest:
    """One checked request."""

    task: str
    form: str
    language: str | None
    prompt: str | None
    temperatures: tuple[float, ...]
    granularities: frozenset[str]
    is_stream: bool
    skips_silence: bool


class Transcript:
    """What was heard so far of one file. `count`: of all its samples."""

    def __init__(self, request: TranscriptionRequest, count: int) -> None:
        self.request, self.count = request, count
        self.language = request.language or ""
        self.segments: list[Any] = []

    @property
    def seconds(self) -> float:
        return self.count / HEARD_HZ

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()


def _usage(transcript: Transcript) -> dict[str, Any]:
    return {"type": "duration", "seconds": round(transcript.seconds, 2)}


async def events(
    transcript: Transcript, segments: AsyncGenerator[Any, None]
) -> AsyncGenerator[dict[str, Any], None]:
    """OpenAI's: a delta for each segment, then the whole. The deltas, joined, are the whole."""
    has_begun = False
    async for segment in segments:
        if segment is None:
            continue
        delta = segment.text if has_begun else segment.text.lstrip()
        has_begun = True
        yield {"type": "transcript.text.delta", "delta": delta}
    yield {"type": "transcript.text.done", "text": transcript.text, "usage": _usage(transcript)}


def _json(transcript: Transcript) -> tuple[str, str]:
    return "application/json", json.dumps({"text": transcript.text, "usage": _usage(transcript)})


def _verbose(transcript: Transcript) -> tuple[str, str]:
    request = transcript.request
    body = {
        "task": request.task,
        "language": transcript.language,
        "duration": round(transcript.seconds, 2),
        "text": transcript.text,
        "usage": _usage(transcript),
    }
    if "word" in request.granularities:
        body["words"] = [
            {"word": word.word.strip(), "start": word.start, "end": word.end}
            for segment in transcript.segments
            for word in segment.words or ()
        ]
    if "segment" in request.granularities or not request.granularities:
        fields = [asdict(segment) for segment in transcript.segments]
        body["segments"] = [{k: v for k, v in row.items() if k != "words"} for row in fields]
    return "application/json", json.dumps(body)


def _text(transcript: Transcript) -> tuple[str, str]:
    return "text/plain; charset=utf-8", transcript.text + "\n"


def _srt(transcript: Transcript) -> tuple[str, str]:
    return "text/plain; charset=utf-8", "\n".join(
        f"{n}\n{_clock(s.start, ',')} --> {_clock(s.end, ',')}\n{s.text.strip()}\n"
        for n, s in enumerate(transcript.segments, 1)
    )


def _vtt(transcript: Transcript) -> tuple[str, str]:
    return "text/vtt; charset=utf-8", "WEBVTT\n\n" + "\n".join(
        f"{_clock(s.start, '.')} --> {_clock(s.end, '.')}\n{s.text.strip()}\n"
        for s in transcript.segments
    )


def _clock(at_s: float, point: str) -> str:
    """`00:01:02,500`, as subtitles have it."""
    total_ms = round(at_s * 1000)
    minutes, ms = divmod(total_ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{ms // 1000:02}{point}{ms % 1000:03}"


WRITE = {"json": _json, "text": _text, "verbose_json": _verbose, "srt": _srt, "vtt": _vtt}
