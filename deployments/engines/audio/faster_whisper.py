"""Transcription by the Whisper family on CTranslate2 (faster-whisper).

`engine_args`: `device` (default: a GPU when there is one, else cpu), `compute_type` (default: int8
on a CPU, float16 on a GPU), `beam_size` (5), `max_seconds` (of one file, 1,800), `threads` (CPU
threads; default: the model's, else one for each core, at most 4), `vad` (the folder of the model
behind `vad_filter`; default made:silero-vad).

The model is a folder that `ct2-transformers-converter` makes; its model.bin is no pickle.
Source: github.com/SYSTRAN/faster-whisper.
"""

import contextlib
import ctypes
import importlib.util
import logging
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import ctranslate2
import numpy as np
from faster_whisper import WhisperModel

from deployments.engines import asgi
from deployments.engines.asgi import BadField
from deployments.engines.audio import sound
from deployments.engines.audio.hearing import TASKS, Hearing
from deployments.engines.audio.sound import HEARD_HZ
from deployments.engines.audio.transcript import Transcript
from deployments.engines.one_thread import compute_threads
from deployments.engines.protocol import Config, EngineLoadFailed, Receive, Scope, Send

logger = logging.getLogger("arbiter.engine")

# What CTranslate2 computes with on a GPU, also beside a torch for CUDA 13.
CUBLAS, BRINGS_CUBLAS = "libcublas.so.12", "`pip install nvidia-cublas-cu12` brings it"


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


class WhisperEngine(Hearing):
    """One model and one thread; requests take turns by segment."""

    can_sleep = False  # on a CPU its library reads the disk again: no more than an unload does

    def __init__(self, config: Config) -> None:
        args = config.get("engine_args", {})
        super().__init__(str(config.get("served_name", config["model"])), args)
        self.path = config["model"]
        self.device: str = args.get("device") or default_device()
        if self.device == "cuda" and not has_cublas():
            raise EngineLoadFailed(
                "NoDevice", f"`device: cuda` takes {CUBLAS}: {BRINGS_CUBLAS}", False
            )
        on_cpu = self.device == "cpu"
        self.compute_type: str = args.get("compute_type") or ("int8" if on_cpu else "float16")
        self.threads = compute_threads(config)
        self.beam_size: int = args.get("beam_size", 5)
        self.model: Any = None

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
            await self.answer(scope, receive, send)
        except BadField as error:
            await asgi.refuse_request(send, error)

    @property
    def is_multilingual(self) -> bool:
        return bool(self.model.model.is_multilingual)

    def knows(self, language: str) -> bool:
        """The library lists what any Whisper knows; what this one does has a token."""
        token = self.model.hf_tokenizer.token_to_id(f"<|{language}|>")
        return language in self.model.supported_languages and token is not None

    def hear(
        self, transcript: Transcript, pieces: Iterator[tuple[int, np.ndarray]]
    ) -> AsyncGenerator[Any, None]:
        return self.worker.each(self._segments(transcript, pieces))

    def _segments(
        self, transcript: Transcript, spans: Iterator[tuple[int, np.ndarray]]
    ) -> Iterator[Any]:
        """Hears piece by piece. None after each: a turn ends there too, because there may be no
        segment in it."""
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


def _moved(segment: Any, by_s: float, number: int) -> Any:
    """A segment of a piece, as one of the file."""
    segment.id, segment.seek = number, segment.seek + round(by_s * 100)  # frames of 10 ms
    for timed in (segment, *(segment.words or ())):
        timed.start, timed.end = round(timed.start + by_s, 2), round(timed.end + by_s, 2)
    return segment
