"""What an engine that transcribes does with a request, whatever hears its sound.

The form is checked, the sound is decoded within bounds and, where a client asks for it, without its
pauses; it is heard in pieces, cut where it is quiet, so that a long file takes no more memory than
a short one and its client may leave between two. The answer is written in OpenAI's shapes.
Source: platform.openai.com/docs/api-reference/audio.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from deployments.config.environment import Environment
from deployments.engines import asgi, forms
from deployments.engines.asgi import BadField
from deployments.engines.audio import sound
from deployments.engines.audio.sound import HEARD_HZ
from deployments.engines.audio.transcript import WRITE, Transcript, TranscriptionRequest, events
from deployments.engines.one_thread import OneThread
from deployments.engines.protocol import Receive, Scope, Send

MAX_SECONDS = 1_800.0  # of one file: half an hour
PIECE_S, CUT_S = 60, 15  # most of a piece of sound, and its last part, in which it may be cut
PAUSE_S = 2.0  # a longer one is skipped with `vad_filter`
QUIET_S = 0.2  # a piece is cut in the quietest span of this length in its last part
TRANSCRIBE, TRANSLATE = "/v1/audio/transcriptions", "/v1/audio/translations"
TASKS = {TRANSCRIBE: "transcribe", TRANSLATE: "translate"}
STREAMED = ("json", "text")  # whose events OpenAI defines
GRANULARITIES = ("segment", "word")
TIMED = "verbose_json"  # the one form that has the times which a request asks for
# Whisper's own temperatures, in its order: a piece is decoded greedily first, and again with the
# next temperature where the text repeats itself or the model is unsure.
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


class Hearing(ABC):
    """Answers requests to transcribe a file. `worker`: the thread that decodes the file and finds
    its pauses. `granularities`: the parts, segments or words, for which the model gives times."""

    granularities: tuple[str, ...] = GRANULARITIES
    piece_s = PIECE_S

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        """`args`: `max_seconds` of one file, and `vad`, the folder of the model that finds
        pauses."""
        self.name = name
        self.max_seconds = float(args.get("max_seconds", MAX_SECONDS))
        self.vad_folder = Path(args.get("vad") or Environment().models / "silero-vad")
        self.vad: Any = None
        self.worker = OneThread("hear")

    @property
    @abstractmethod
    def is_multilingual(self) -> bool:
        """Says whether the model knows more than English."""

    @abstractmethod
    def knows(self, language: str) -> bool:
        """Says whether the model has a token for a language of ISO 639-1."""

    @abstractmethod
    def hear(
        self, transcript: Transcript, pieces: Iterator[tuple[int, np.ndarray]]
    ) -> AsyncGenerator[Any, None]:
        """Yields segments, whose times count from the begin of the file, and adds each to the
        transcript; None ends a turn without one. `pieces`: begin in samples, and int16 samples."""

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a path of TASKS. Raises RequestError before the head is sent."""
        form = await forms.read(scope, receive)
        if form is None:
            return
        request = self.checked(form, TASKS[scope["path"]])
        work = self._answer(request, form.file("file"), send)
        await asgi.until_disconnected(work, receive)

    def checked(self, form: forms.Form, task: str) -> TranscriptionRequest:
        """Reads the form of a request, as far as this model can serve it. Raises BadField."""
        multilingual = self.is_multilingual
        if task == "translate" and not multilingual:
            text = f"{self.name} knows English only; translation takes a multilingual Whisper model"
            raise BadField("model", text)
        language = form.text("language").lower() or (None if multilingual else "en")
        if language is not None and not self.knows(language):
            languages = "ISO 639-1, as `de`" if multilingual else f"{self.name} knows `en` only"
            raise BadField("language", f"{language!r} is no language of this model: {languages}")
        request = TranscriptionRequest(
            task,
            _one_of(form, "response_format", tuple(WRITE)),
            language,
            form.text("prompt") or None,
            _temperatures(form.text("temperature")),
            _granularities(form, self.granularities),
            _flag(form, "stream"),
            _flag(form, "vad_filter") or _flag(form, "x_vad_filter"),
        )
        if request.skips_silence and not self.vad_folder.is_dir():
            text = f"`vad_filter` takes a model in {self.vad_folder}, which is not there"
            raise BadField("vad_filter", text)
        if request.is_stream and request.form not in STREAMED:
            text = f"`stream` takes {' or '.join(STREAMED)}, not {request.form}"
            raise BadField("response_format", text)
        if request.granularities and request.form != TIMED:
            text = f"`timestamp_granularities` takes `response_format` {TIMED}, not {request.form}"
            raise BadField("timestamp_granularities", text)
        return request

    async def _answer(self, request: TranscriptionRequest, raw: bytes, send: Send) -> None:
        """Raises BadField before the head is sent."""
        file = sound.SoundFile(raw, self.max_seconds)
        spans = await self._spans(request, file)
        transcript = Transcript(request, file.count)
        segments = self.hear(transcript, pieces(file.parts(), spans, self.piece_s))
        if request.is_stream:
            return await asgi.stream_events(send, events(transcript, segments))
        async for _ in segments:  # `transcript` keeps them
            continue
        kind, body = WRITE[request.form](transcript)
        await asgi.send_bytes(send, kind, body.encode())

    async def _spans(
        self, request: TranscriptionRequest, file: sound.SoundFile
    ) -> list[tuple[int, int]]:
        """Begin and end of what is to be heard, in samples. Reads the file to its end, in turns, so
        that it is refused before anything of it is heard. Raises BadSound."""
        if not request.skips_silence:
            async for _ in self.worker.each(file.parts()):
                continue
            return [(0, file.count)]
        from deployments.engines.audio import silero  # imports torch, so only where it is needed

        parts = [p async for p in self.worker.each(self._probabilities(file.parts()))]
        return joined(silero.spans([p for part in parts for p in part], file.count))

    def _probabilities(self, parts: Iterator[np.ndarray]) -> Iterator[list[float]]:
        from deployments.engines.audio import silero

        if self.vad is None:
            self.vad = silero.load(self.vad_folder)
        yield from silero.probabilities(self.vad, parts)


def joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins spans that have a pause below PAUSE_S between them, because Whisper understands words
    by their context."""
    merged: list[tuple[int, int]] = []
    for begin, end in spans:
        if merged and begin - merged[-1][1] < PAUSE_S * HEARD_HZ:
            merged[-1] = merged[-1][0], end
        else:
            merged.append((begin, end))
    return merged


def pieces(
    parts: Iterable[np.ndarray], spans: list[tuple[int, int]], most_s: int = PIECE_S
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields pieces of at most `most_s` seconds, each with its begin, in samples: the spans, of
    which longer ones are cut where they are quiet. `parts`: the samples of the file."""
    window = sound.Window(parts)
    for start, end in spans:
        begin = start
        while end - begin > most_s * HEARD_HZ:
            samples = window.read(begin, begin + most_s * HEARD_HZ)
            count = _quietest(samples, (most_s - CUT_S) * HEARD_HZ)
            yield begin, samples[:count]
            begin += count
        yield begin, window.read(begin, end)


def _quietest(samples: np.ndarray, begin: int) -> int:
    """The middle of the quietest QUIET_S behind a sample."""
    width = int(QUIET_S * HEARD_HZ)
    rows = np.abs(samples[begin:].astype(np.int32)).reshape(-1, width).sum(1)
    return begin + int(rows.argmin()) * width + width // 2


def _one_of(form: forms.Form, name: str, choices: tuple[str, ...]) -> str:
    choice = form.text(name, choices[0])
    if choice not in choices:
        raise BadField(name, f"`{name}` {choice!r} is none of {', '.join(choices)}")
    return choice


def _flag(form: forms.Form, name: str) -> bool:
    text = form.text(name, "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise BadField(name, f"`{name}` {text!r} is neither true nor false")
    return text in ("true", "1")


def _temperatures(value: str) -> tuple[float, ...]:
    try:
        temperature = float(value or 0.0)
    except ValueError:
        temperature = -1.0
    if not 0.0 <= temperature <= 1.0:
        raise BadField("temperature", f"`temperature` {value!r} is no number from 0 to 1")
    return (temperature,) if temperature else TEMPERATURES


def _granularities(form: forms.Form, choices: tuple[str, ...]) -> frozenset[str]:
    granularities = frozenset(form.all("timestamp_granularities"))
    if wrong := sorted(granularities - set(choices)):
        text = f"`timestamp_granularities` {wrong[0]!r} is none of {', '.join(choices)}"
        raise BadField("timestamp_granularities", text)
    return granularities
