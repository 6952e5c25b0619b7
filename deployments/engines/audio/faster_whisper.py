"""Transcription by the Whisper family on CTranslate2 (faster-whisper), in OpenAI's shapes.

`engine_args`: `device` (default: a GPU when there is one, else cpu), `compute_type` (default: int8
on a CPU, float16 on a GPU), `beam_size` (5), `max_seconds` (of one file, 1,800), `threads` (CPU
threads; default: the model's, else one for each core, at most 4), `vad` (the folder of the model
behind `vad_filter`; default made:silero-vad).

The model is a folder that `ct2-transformers-converter` makes; its model.bin is no pickle. Sound is
decoded and heard in pieces, cut where it is quiet, so that a long file takes no more memory than a
short one and its client may leave between two segments.
Source: github.com/SYSTRAN/faster-whisper, platform.openai.com/docs/api-reference/audio.
"""

import contextlib
import ctypes
import importlib.util
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
from faster_whisper import WhisperModel

from deployments.engines import asgi, forms
from deployments.engines.asgi import BadField
from deployments.engines.audio import sound
from deployments.engines.audio.sound import HEARD_HZ
from deployments.engines.audio.transcript import WRITE, Transcript, TranscriptionRequest, events
from deployments.engines.one_thread import OneThread, compute_threads
from deployments.engines.protocol import Config, EngineLoadFailed, Receive, Scope, Send
from deployments.environment import Environment

logger = logging.getLogger("arbiter.engine")

# What CTranslate2 computes with on a GPU, also beside a torch for CUDA 13.
CUBLAS, BRINGS_CUBLAS = "libcublas.so.12", "`pip install nvidia-cublas-cu12` brings it"
MAX_SECONDS = 1_800.0  # of one file: half an hour
PIECE_S, CUT_S = 60, 15  # a piece of sound, and its last part, in which it may be cut
PAUSE_S = 2.0  # a longer one is skipped with `vad_filter`
QUIET_S = 0.2  # the quietest such time in there is where it is cut
TRANSCRIBE, TRANSLATE = "/v1/audio/transcriptions", "/v1/audio/translations"
TASKS = {TRANSCRIBE: "transcribe", TRANSLATE: "translate"}
STREAMED = ("json", "text")  # whose events OpenAI defines
GRANULARITIES = ("segment", "word")
TIMED = "verbose_json"  # the one form that has the times which a request asks for
# Whisper's own order: greedy, and warmer where that repeats itself or is unsure.
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def default_device() -> str:
    """A GPU where the library can compute on one."""
    if ctranslate2.get_cuda_device_count() == 0:
        return "cpu"
    if has_cublas():
        return "cuda"
    logger.warning("Whisper computes on the CPU, without %s: %s", CUBLAS, BRINGS_CUBLAS)
    return "cpu"


def has_cublas() -> bool:
    """CTranslate2 opens it by that name at its first product, and every request fails without it.
    Where pip has it, it is in no folder that the linker knows, so it is opened for it here."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    for path in (CUBLAS, *(f"{folder}/cublas/lib/{CUBLAS}" for folder in folders)):
        with contextlib.suppress(OSError):
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            return True
    return False


def build(config: Config) -> "WhisperEngine":
    return WhisperEngine(config)


class WhisperEngine:
    """One model and one thread; requests take turns by segment."""

    can_sleep = False  # on a CPU its library reads the disk again: no more than an unload does

    def __init__(self, config: Config) -> None:
        args = config.get("engine_args", {})
        self.path, self.name = config["model"], config.get("served_name", config["model"])
        self.device: str = args.get("device") or default_device()
        if self.device == "cuda" and not has_cublas():
            raise EngineLoadFailed(
                "NoDevice", f"`device: cuda` takes {CUBLAS}: {BRINGS_CUBLAS}", False
            )
        on_cpu = self.device == "cpu"
        self.compute_type: str = args.get("compute_type") or ("int8" if on_cpu else "float16")
        self.threads = compute_threads(config)
        self.beam_size: int = args.get("beam_size", 5)
        self.max_seconds = float(args.get("max_seconds", MAX_SECONDS))
        self.worker = OneThread("hear")
        self.vad_folder = Path(args.get("vad") or Environment().models / "silero-vad")
        self.model: Any = None
        self.vad: Any = None

    async def load(self) -> None:
        await self.worker.run(self._load)

    def _load(self) -> None:
        self.model = WhisperModel(
            self.path,
            device=self.device,
            compute_type=self.compute_type,
            cpu_threads=self.threads,
            local_files_only=True,
        )

    async def health(self) -> None:
        self.worker.check()

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in TASKS or scope["method"] != "POST":
            return await asgi.refuse(send, 404, f"no route {scope['method']} {scope['path']}")
        try:
            form = await forms.read(scope, receive)
            if form is None:
                return
            request = self.checked(form, TASKS[scope["path"]])
            work = self._answer(request, form.file("file"), send)
            await asgi.until_disconnected(work, receive)
        except BadField as error:
            await asgi.refuse_request(send, error)

    def checked(self, form: forms.Form, task: str) -> TranscriptionRequest:
        """Reads the form of a request, as far as this model can serve it. Raises BadField."""
        multilingual = self.model.model.is_multilingual
        if task == "translate" and not multilingual:
            text = f"{self.name} knows English only; translation takes a multilingual Whisper model"
            raise BadField("model", text)
        language = form.text("language").lower() or (None if multilingual else "en")
        if language is not None and not self._knows(language):
            languages = "ISO 639-1, as `de`" if multilingual else f"{self.name} knows `en` only"
            raise BadField("language", f"{language!r} is no language of this model: {languages}")
        request = TranscriptionRequest(
            task,
            _one_of(form, "response_format", tuple(WRITE)),
            language,
            form.text("prompt") or None,
            _temperatures(form.text("temperature")),
            _granularities(form),
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

    def _knows(self, language: str) -> bool:
        """The library lists what any Whisper knows; what this one does has a token."""
        token = self.model.hf_tokenizer.token_to_id(f"<|{language}|>")
        return language in self.model.supported_languages and token is not None

    async def _answer(self, request: TranscriptionRequest, raw: bytes, send: Send) -> None:
        """Raises BadField before the head is sent."""
        file = sound.SoundFile(raw, self.max_seconds)
        spans = await self._spans(request, file)
        transcript = Transcript(request, file.count)
        segments = self.worker.each(self._segments(transcript, pieces(file.parts(), spans)))
        if request.is_stream:
            return await asgi.stream_events(send, events(transcript, segments))
        async for _ in segments:  # `transcript` keeps them
            continue
        kind, body = WRITE[request.form](transcript)
        await asgi.send_bytes(send, kind, body.encode())

    def _segments(
        self, transcript: Transcript, spans: Iterator[tuple[int, np.ndarray]]
    ) -> Iterator[Any]:
        """Hears piece by piece; times count from the begin of the file. None after each piece: a
        turn ends there too, because there may be no segment in it."""
        request = transcript.request
        for begin, samples in spans:
            segments, info = self.model.transcribe(
                sound.floats(samples),
                language=transcript.language or None,
                task=request.task,
                beam_size=self.beam_size,
                temperature=request.temperatures,
                condition_on_previous_text=False,  # one wrong word would be repeated for minutes
                initial_prompt=request.prompt,
                word_timestamps="word" in request.granularities,
            )
            transcript.language = info.language  # as heard in the first piece
            for segment in segments:
                moved = _moved(segment, begin / HEARD_HZ, len(transcript.segments))
                transcript.segments.append(moved)
                yield moved
            yield None

    async def _spans(
        self, request: TranscriptionRequest, file: sound.SoundFile
    ) -> list[tuple[int, int]]:
        """Begin and end of what is to be heard, in samples. Reads the file to its end, in turns, so
        that it is refused before anything of it is heard. Raises BadSound."""
        if not request.skips_silence:
            async for _ in self.worker.each(file.parts()):
                continue
            return [(0, file.count)]
        from deployments.engines.audio import silero  # and torch, where a client asks for it

        parts = [p async for p in self.worker.each(self._probabilities(file.parts()))]
        return joined(silero.spans([p for part in parts for p in part], file.count))

    def _probabilities(self, parts: Iterator[np.ndarray]) -> Iterator[list[float]]:
        from deployments.engines.audio import silero

        if self.vad is None:
            self.vad = silero.load(self.vad_folder)
        yield from silero.probabilities(self.vad, parts)


def joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans with a short pause between them become one: Whisper hears words by what is around."""
    merged: list[tuple[int, int]] = []
    for begin, end in spans:
        if merged and begin - merged[-1][1] < PAUSE_S * HEARD_HZ:
            merged[-1] = merged[-1][0], end
        else:
            merged.append((begin, end))
    return merged


def pieces(
    parts: Iterable[np.ndarray], spans: list[tuple[int, int]]
) -> Iterator[tuple[int, np.ndarray]]:
    """Begin, in samples, and samples of what is at most PIECE_S long: spans, cut where they are
    quiet. `parts`: of the file."""
    window = sound.Window(parts)
    for start, end in spans:
        begin = start
        while end - begin > PIECE_S * HEARD_HZ:
            samples = window.read(begin, begin + PIECE_S * HEARD_HZ)
            count = _quietest(samples, (PIECE_S - CUT_S) * HEARD_HZ)
            yield begin, samples[:count]
            begin += count
        yield begin, window.read(begin, end)


def _quietest(samples: np.ndarray, begin: int) -> int:
    """The middle of the quietest QUIET_S behind a sample."""
    width = int(QUIET_S * HEARD_HZ)
    rows = np.abs(samples[begin:].astype(np.int32)).reshape(-1, width).sum(1)
    return begin + int(rows.argmin()) * width + width // 2


def _moved(segment: Any, by_s: float, number: int) -> Any:
    """A segment of a piece, as one of the file."""
    segment.id, segment.seek = number, segment.seek + round(by_s * 100)  # frames of 10 ms
    for timed in (segment, *(segment.words or ())):
        timed.start, timed.end = round(timed.start + by_s, 2), round(timed.end + by_s, 2)
    return segment


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


def _granularities(form: forms.Form) -> frozenset[str]:
    granularities = frozenset(form.all("timestamp_granularities"))
    if wrong := sorted(granularities - set(GRANULARITIES)):
        text = f"`timestamp_granularities` {wrong[0]!r} is none of {', '.join(GRANULARITIES)}"
        raise BadField("timestamp_granularities", text)
    return granularities
