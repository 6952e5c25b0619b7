"""Long files, many at once: decoded part by part, so that none is in memory whole."""

import asyncio
import json
import tracemalloc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deployments.engines.audio import faster_whisper, hearing, silero, sound
from tests.support.speech import form

MINUTES, AT_ONCE = 2, 4
WHOLE_BYTES = MINUTES * 60 * sound.HEARD_HZ * np.dtype(np.int16).itemsize


@pytest.fixture(scope="module")
def long() -> bytes:
    encoder = sound.Encoder("flac", 8_000)
    minute = np.zeros(60 * 8_000, np.float32)
    return b"".join([encoder.add(minute) for _ in range(MINUTES)] + [encoder.end()])


@pytest.mark.spec("H3")
@pytest.mark.parametrize("seconds", [0.2, 9.984, 30, 75])
def test_parts_are_the_whole_sound_at_each_reading(seconds: float) -> None:
    encoder = sound.Encoder("wav", sound.HEARD_HZ, whole=True)
    dice = np.random.default_rng(1)
    encoder.add(dice.uniform(-1, 1, int(seconds * sound.HEARD_HZ)).astype(np.float32))
    raw = encoder.end()
    whole, file = sound.decode(raw, 100), sound.SoundFile(raw, 100)
    for _ in range(2):
        *parts, last = file.parts()
        assert {len(part) for part in parts} <= {sound.PART} and len(last) <= sound.PART
        assert np.array_equal(np.concatenate([*parts, last]), whole)
        assert file.count == len(whole)


class Deaf:
    """Hears nothing, in any sound. `heard`: samples that it was given."""

    supported_languages = ("en",)
    model = SimpleNamespace(is_multilingual=False)
    hf_tokenizer = SimpleNamespace(token_to_id={"<|en|>": 7}.get)

    def __init__(self) -> None:
        self.heard = 0

    def transcribe(self, samples: np.ndarray, **_: Any) -> tuple[Iterator[Any], Any]:
        self.heard += len(samples)
        return iter(()), SimpleNamespace(language="en")


def hears() -> Any:
    made = faster_whisper.build({"model": "x", "engine_args": {"device": "cpu"}})
    made.model = Deaf()
    return made


def finds() -> Any:
    made = silero.build({"model": "x"})
    made.model = silero.SileroVad().eval()
    return made


async def asked(engine: Any, path: str, raw: bytes, **fields: str) -> Any:
    """The answer of an engine to a form, with JSON."""
    body, kind = form(raw, **fields)
    sent: list[dict[str, Any]] = []
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return unread.pop() if unread else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"path": path, "method": "POST", "headers": [(b"content-type", kind.encode())]}
    await engine.app(scope, receive, send)
    assert sent[0]["status"] == 200, sent
    return json.loads(b"".join(message["body"] for message in sent[1:]))


@pytest.mark.spec("H3", "H6")
@pytest.mark.parametrize(
    ("build", "path"),
    [(hears, "/v1/audio/transcriptions"), (finds, "/v1/audio/vad")],
    ids=["whisper", "silero"],
)
async def test_long_files_that_are_heard_at_once_are_not_in_memory_whole(
    build: Callable[[], Any], path: str, long: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sound, "KEPT", sound.HEARD_HZ)  # so that two minutes count as long
    monkeypatch.setattr(hearing.Hearing, "piece_s", 12)
    monkeypatch.setattr(hearing, "CUT_S", 2)
    engine = build()
    tracemalloc.start()
    try:
        answers = await asyncio.gather(*(asked(engine, path, long) for _ in range(AT_ONCE)))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 0.75 * AT_ONCE * WHOLE_BYTES
    found = {answer.get("duration") or answer["usage"]["seconds"] for answer in answers}
    assert found == {60.0 * MINUTES}
    if isinstance(engine.model, Deaf):
        assert engine.model.heard == AT_ONCE * 60 * MINUTES * sound.HEARD_HZ
