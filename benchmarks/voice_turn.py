"""Seconds of a voice turn from nothing loaded, with and without preload of the pipeline (C11).

    python -m benchmarks.voice_turn --pairs 20

A turn sends a spoken question over HTTP through vad, asr, chat and tts of the shipped
configuration. Pairs take `preload: off` and `preload: declared` in alternating order, in one run;
before each turn everything is unloaded, while the replicas stay. `first_sound` is what the caller
waits for: from the first request to the first sound of the answer.
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks import report
from benchmarks.first_token import shipped, table_of
from tests.graph.conftest import Graph, started, until
from tests.support.graph_commands import send, unload_all

VAD, ASR, CHAT, TTS = "silero-vad", "tiny.en", "small-chat", "joe"
QUESTION = "What is a ticket?"
WORDS = "A ticket, a lease, a holder."  # without it Whisper hears "What is it ticket?"
MODES = ("off", "declared")
STAYS_S = 3_600.0  # no model and no replica leaves by itself between two turns
ANSWER_S = 120.0
SETTLED_S = 60.0  # for what is unloaded, and for the readings that measure a model
Turn = dict[str, float]  # seconds by stage, and of the whole


def as_shipped(config: dict[str, Any]) -> None:
    """The shipped models and budget in place of what the tests need, and times that let them
    stay."""
    own, tests = table_of(shipped(STAYS_S, STAYS_S)), table_of(config)
    tests["capabilities"] = own["capabilities"]
    tests["arbiter"]["arenas"] = own["arbiter"]["arenas"]


class Caller:
    """A client that speaks with the system. Its methods raise httpx.HTTPError."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def find_speech(self, sound: bytes) -> int:
        """How many stretches of speech there are."""
        return len(self._upload("/v1/audio/vad", sound, model=VAD)["segments"])

    def transcribe(self, sound: bytes) -> str:
        said = self._upload("/v1/audio/transcriptions", sound, model=ASR, prompt=WORDS)
        return str(said["text"]).strip()

    def answer(self, question: str) -> str:
        said: list[str] = []
        message = {"role": "user", "content": question}
        body = {"model": CHAT, "messages": [message], "temperature": 0, "max_tokens": 48}
        with self._stream("/v1/chat/completions", body | {"stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    choices = json.loads(line.removeprefix("data: "))["choices"]
                    said += [choice["delta"].get("content") or "" for choice in choices]
        return "".join(said)

    def speak(self, text: str, form: str = "pcm") -> tuple[bytes, float]:
        """The sound, and when its first part was there by `time.perf_counter`."""
        body = {"model": TTS, "voice": TTS, "input": text, "response_format": form}
        with self._stream("/v1/audio/speech", body) as response:
            parts = response.iter_bytes()
            first = next(parts)
            first_at_s = time.perf_counter()
            return first + b"".join(parts), first_at_s

    def turn(self, sound: bytes) -> Turn:
        """Speaks, and hears the answer. Raises RuntimeError where no speech was found."""
        marks_s = [time.perf_counter()]
        if not self.find_speech(sound):
            raise RuntimeError("the question has no speech in it")
        marks_s.append(time.perf_counter())
        question = self.transcribe(sound)
        marks_s.append(time.perf_counter())
        answer = self.answer(question)
        marks_s.append(time.perf_counter())
        _, first_at_s = self.speak(answer)
        marks_s.append(time.perf_counter())
        stages = zip(("vad", "asr", "chat", "tts"), marks_s, marks_s[1:], strict=False)
        took = {stage: end_s - start_s for stage, start_s, end_s in stages}
        return took | {"first_sound": first_at_s - marks_s[0], "total": marks_s[-1] - marks_s[0]}

    def _upload(self, path: str, sound: bytes, **fields: str) -> Any:
        answer = self._http.post(path, data=fields, files={"file": ("question.wav", sound)})
        return answer.raise_for_status().json()

    def _stream(self, path: str, body: dict[str, Any]) -> Any:
        return self._http.stream("POST", path, json=body)


def measured(graph: Graph, model: str) -> None:
    """Waits until the arbiter has learned what the resident model takes: only then is it
    prefetched."""
    learned = ("estimate_error", model)

    def is_learned() -> bool:
        return any((e["kind"], e.get("model")) == learned for e in graph.events())

    until(is_learned, SETTLED_S, f"{model} is measured")


def first_turn(graph: Graph, caller: Caller) -> bytes:
    """Has every model loaded and measured once. Returns the spoken question."""
    sound, _ = caller.speak(QUESTION, "wav")
    measured(graph, TTS)
    caller.find_speech(sound)
    measured(graph, VAD)
    question = caller.transcribe(sound)
    measured(graph, ASR)
    print(f"{question!r} -> {caller.answer(question)!r}", flush=True)
    measured(graph, CHAT)
    return sound


def set_preload(graph: Graph, mode: str) -> None:
    now = send(graph, "GET", "/arbiter/settings")
    change = {"generation": now["generation"], "settings": {"preload": mode}}
    send(graph, "PUT", "/arbiter/settings", change)


def from_nothing(graph: Graph, caller: Caller, sound: bytes, mode: str) -> tuple[Turn, list[str]]:
    """One turn with nothing loaded before it. Returns it, and the models that were prefetched."""
    set_preload(graph, mode)
    until(lambda: unload_all(graph) and not graph.engines(), SETTLED_S, "nothing is loaded")
    seen = graph.state()["sequence"]
    took = caller.turn(sound)
    events = [e for e in graph.events() if e["seq"] > seen and e["kind"] == "model_preload"]
    return took, [str(e["model"]) for e in events]


def percentiles(turns: Sequence[Turn]) -> dict[str, dict[str, float]]:
    """p50 and p95 of each stage in seconds."""
    rows = {}
    for stage in turns[0]:
        middle, high = np.percentile([turn[stage] for turn in turns], [50, 95])
        rows[f"{stage}_s"] = {"p50": round(float(middle), 3), "p95": round(float(high), 3)}
    return rows


def compare(graph: Graph, pairs: int) -> dict[str, Any]:
    turns: dict[str, list[Turn]] = {mode: [] for mode in MODES}
    prefetched: Counter[str] = Counter()
    with httpx.Client(base_url=graph.url, timeout=ANSWER_S) as http:
        caller = Caller(http)
        sound = first_turn(graph, caller)
        for number in range(pairs):
            for mode in MODES if number % 2 else reversed(MODES):
                took, models = from_nothing(graph, caller, sound, mode)
                turns[mode].append(took)
                prefetched.update(models)
    figures: dict[str, Any] = {"pairs": pairs, "prefetched": dict(prefetched)}
    figures |= {mode: percentiles(turns[mode]) for mode in MODES}
    for name in ("first_sound", "total"):
        off, declared = ([turn[name] for turn in turns[mode]] for mode in MODES)
        figures[f"{name}_ratio"] = report.paired_ratio(declared, off)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="voice-") as folder:
        with started(Path(folder), as_shipped) as graph:
            figures = compare(graph, args.pairs)
    for stage, off in figures["off"].items():
        print(f"{stage}: off {off}, declared {figures['declared'][stage]}")
    for name in ("first_sound_ratio", "total_ratio"):
        print(f"{name}, declared by off: {figures[name]}")
    report.write("voice_turn", figures)


if __name__ == "__main__":
    main()
