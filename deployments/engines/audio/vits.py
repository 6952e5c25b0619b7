"""Speech from VITS voices of Piper's format on onnxruntime, in OpenAI's shapes; and from espeak-ng,
where the model's source is the word `espeak-ng`.

`engine_args`: `device` (cpu or cuda; default: what onnxruntime can use), `noise` (of the voice,
default its own; 0: the same text gives the same samples), `voices` (further names for its voice, or
for its speakers: `{alloy: joe}`), `phrases` (texts whose speech is kept, as "One moment."),
`threads` (default: the model's, else one for each core, at most 4).

A voice is one .onnx file with its .onnx.json beside it. Text is spoken clause by clause: the first
is on its way while the next is made, and a client that leaves stops its work after some 10 s of
sound (voices.RUN_PHONEMES).
Source: github.com/OHF-Voice/piper1-gpl (docs, VITS training), arXiv 2106.06103.
"""

import base64
import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deployments.config.model_section import ESPEAK
from deployments.engines import asgi
from deployments.engines.asgi import BadField
from deployments.engines.audio import sound
from deployments.engines.audio.espeak import Espeak
from deployments.engines.audio.voices import EspeakVoice, VitsVoice, Voice, clauses_of
from deployments.engines.one_thread import OneThread, compute_threads
from deployments.engines.protocol import Config, Receive, Scope, Send

SPEECH = "/v1/audio/speech"
MAX_CHARACTERS = 4_096  # OpenAI's bound
SPEEDS = (0.25, 4.0)  # OpenAI's bounds
PAUSE_S = 0.2  # after a sentence, as Piper has it: without it the next one begins in its last word
KEPT_BYTES = 8 << 20  # of phrases: some 60 of 3 s
HOP = 256  # samples that a VITS decoder makes of one frame: its output tokens

_UNSPOKEN = re.compile(r"[\x00-\x09\x0b-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """One checked request."""

    text: str
    voice: str
    form: str
    speed: float
    stream: str  # sse, audio, or nothing said


def build(config: Config) -> "SpeechEngine":
    return SpeechEngine(config, open_voice)


def open_voice(config: Config) -> Voice:
    args = config.get("engine_args", {})
    if config["model"] == ESPEAK:
        return EspeakVoice(Espeak(), args.get("voices", {}))
    return VitsVoice(Path(config["model"]), Espeak(), args, compute_threads(config))


class SpeechEngine:
    """An engine that speaks, with any Voice, in one thread. Requests take turns by run
    (voices.RUN_PHONEMES)."""

    can_sleep = False

    def __init__(self, config: Config, open_voice: Callable[[Config], Voice]) -> None:
        """`open_voice`: called once, in the thread that speaks."""
        self.config, self.open_voice = config, open_voice
        self.worker = OneThread("speak")
        phrases: list[str] = config.get("engine_args", {}).get("phrases", [])
        self.kept = PhraseCache(clause for phrase in phrases for clause in clauses_of(phrase))
        self.voice: Any = None

    async def load(self) -> None:
        self.voice = await self.worker.run(self.open_voice, self.config)

    async def health(self) -> None:
        self.worker.check()

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != SPEECH or scope["method"] != "POST":
            return await asgi.refuse(send, 404, f"no route {scope['method']} {scope['path']}")
        body = await asgi.read_body(receive)
        if body is None:
            return
        try:
            work = self._answer(parse(body), send)
            await asgi.until_disconnected(work, receive)
        except BadField as error:
            await asgi.refuse_request(send, error)

    async def _answer(self, request: SpeechRequest, send: Send) -> None:
        """Raises BadField before the head is sent."""
        voice, clauses = await self.worker.run(self._planned, request)
        whole = request.form in sound.KNOW_THEIR_LENGTH and not request.stream
        progress = SpeechUsage()
        pieces = self.worker.each(self._spoken(request, voice, clauses, progress, whole=whole))
        kind = sound.WRITTEN[request.form].media_type
        if request.stream == "sse":
            await asgi.stream_events(send, _events(pieces, progress))
        elif whole:
            await asgi.send_bytes(send, kind, b"".join([piece async for piece in pieces]))
        else:
            await asgi.stream_bytes(send, kind, pieces)

    def _planned(self, request: SpeechRequest) -> tuple[str, list[tuple[str, Any]]]:
        """Returns the voice, and each clause as text and as `speak` of the voice takes it. Raises
        BadField."""
        voice = self.voice.name_of(request.voice)
        pairs = ((part, self.voice.clause(part)) for part in clauses_of(request.text))
        clauses = [(part, clause) for part, clause in pairs if clause is not None]
        if not clauses:
            raise BadField("input", "`input` has nothing in it that can be spoken")
        return voice, clauses

    def _spoken(
        self,
        request: SpeechRequest,
        voice: str,
        clauses: list[tuple[str, Any]],
        progress: "SpeechUsage",
        *,
        whole: bool,
    ) -> Iterator[bytes]:
        """Yields the encoded bytes of each run of a clause, then those that end the file."""
        encoder = sound.Encoder(request.form, self.voice.rate_hz, whole=whole)
        pause = np.zeros(int(PAUSE_S / request.speed * self.voice.rate_hz), np.float32)
        for number, (text, clause) in enumerate(clauses, 1):
            key = (text, voice, request.speed)
            kept = self.kept.get(key)
            is_kept = kept is None and self.kept.may_keep(text)
            spoken: list[np.ndarray] = []
            speech = self.voice.speak(clause, voice, request.speed) if kept is None else [kept]
            progress.input_tokens += len(clause)
            for samples in speech:
                if is_kept:
                    spoken.append(samples)
                progress.output_tokens += len(samples) // HOP
                yield encoder.add(samples)
            if is_kept:
                self.kept.keep(key, np.concatenate(spoken))
            if number < len(clauses) and text.endswith((".", "!", "?", ";", ":")):
                progress.output_tokens += len(pause) // HOP
                yield encoder.add(pause)
        yield encoder.end()


class SpeechUsage:
    """What an answer took: phonemes in, frames out."""

    def __init__(self) -> None:
        self.input_tokens = self.output_tokens = 0

    def usage(self) -> dict[str, int]:
        total = self.input_tokens + self.output_tokens
        return {
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "total_tokens": total,
        }


class PhraseCache:
    """Keeps the speech of configured clauses. Others are not kept, because a client could tell by
    the time of an answer what other clients have had spoken."""

    def __init__(self, texts: Iterable[str], most_bytes: int = KEPT_BYTES) -> None:
        self._texts, self._most_bytes = frozenset(texts), most_bytes
        self._kept: OrderedDict[tuple[str, str, float], np.ndarray] = OrderedDict()
        self.size_bytes = 0

    def may_keep(self, text: str) -> bool:
        """Says whether a clause is one of those that are configured."""
        return text in self._texts

    def get(self, key: tuple[str, str, float]) -> np.ndarray | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def keep(self, key: tuple[str, str, float], samples: np.ndarray) -> None:
        """Keeps the speech of a configured clause. Where there is no room, the clause that was used
        longest ago is dropped."""
        if not self.may_keep(key[0]) or samples.nbytes > self._most_bytes:
            return
        self._kept[key] = samples
        self.size_bytes += samples.nbytes
        while self.size_bytes > self._most_bytes:
            self.size_bytes -= self._kept.popitem(last=False)[1].nbytes


def parse(raw: bytes) -> SpeechRequest:
    """Reads a request for speech. Raises BadField."""
    body = asgi.json_object(raw)
    text, voice = body.get("input"), body.get("voice") or ""
    if isinstance(voice, dict):
        voice = voice.get("id")
    if not isinstance(text, str) or not 1 <= len(text) <= MAX_CHARACTERS:
        raise BadField("input", f"`input` takes text of 1 to {MAX_CHARACTERS} characters")
    if not isinstance(voice, str):
        raise BadField("voice", '`voice` takes a name, or an object as {"id": "joe"}')
    form = body.get("response_format") or "mp3"
    if not isinstance(form, str) or form not in sound.WRITTEN:
        names = ", ".join(sound.WRITTEN)
        raise BadField("response_format", f"`response_format` {form!r} is none of {names}")
    stream = body.get("stream_format") or ""
    if stream not in ("", "sse", "audio"):
        raise BadField("stream_format", f"`stream_format` {stream!r} is neither sse nor audio")
    return SpeechRequest(_UNSPOKEN.sub(" ", text), voice, form, _speed(body.get("speed")), stream)


def _speed(value: object) -> float:
    speed = 1.0 if value is None else value
    if isinstance(speed, bool) or not isinstance(speed, int | float):
        raise BadField("speed", "`speed` takes a number")
    if not SPEEDS[0] <= speed <= SPEEDS[1]:
        raise BadField("speed", f"`speed` {speed} is not from {SPEEDS[0]} to {SPEEDS[1]}")
    return float(speed)


async def _events(
    pieces: AsyncGenerator[bytes, None], progress: SpeechUsage
) -> AsyncIterator[dict[str, Any]]:
    """OpenAI's: the bytes of the file in base64, then what it took."""
    async for piece in pieces:
        if piece:
            yield {"type": "speech.audio.delta", "audio": base64.b64encode(piece).decode()}
    yield {"type": "speech.audio.done", "usage": progress.usage()}
