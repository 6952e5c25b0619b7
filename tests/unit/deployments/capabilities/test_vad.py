"""Voice activity detection tells the arbiter that a person has begun to speak."""

import json

import pytest

from arbiter.core import events as ev
from arbiter.units import HolderId
from deployments.capabilities import vad
from deployments.capabilities.vad import QUIET_S, VadServer
from deployments.messages import FullResponse, InferenceCall, ResponseHead

pytestmark = pytest.mark.spec("G1")
CALL = InferenceCall("/v1/audio/vad", b"", {}, "req-1", "m")
SPAN = {"start": 0.1, "end": 0.9}


class Listener:
    """Stands for a Residency and its client."""

    holder = HolderId("vad#1")

    def __init__(self) -> None:
        self.told: list[ev.Event] = []

    def client(self) -> "Listener":
        return self

    def tell(self, event: ev.Event) -> None:
        self.told.append(event)


class QuietVad(VadServer):
    def __init__(self, listener: Listener) -> None:
        self._residency = listener  # type: ignore[assignment]
        self._speech_until_s = 0.0

    def __del__(self) -> None:  # type: ignore[override]
        """Nothing was started."""


def answer(*segments: object, status: int = 200) -> FullResponse:
    return FullResponse(ResponseHead(status, {}), json.dumps({"segments": segments}).encode())


def test_speech_is_told_at_its_start_and_not_again_while_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(vad.time, "monotonic", lambda: now_s)
    server = QuietVad(listener := Listener())
    for _ in range(3):
        server.note_answer(CALL, answer(SPAN))
    assert listener.told == [ev.SpeechStarted(HolderId("vad#1"))]
    now_s += QUIET_S
    server.note_answer(CALL, answer(SPAN))
    assert len(listener.told) == 2


def test_silence_and_refusals_are_no_speech() -> None:
    server = QuietVad(listener := Listener())
    server.note_answer(CALL, answer())
    server.note_answer(CALL, answer(SPAN, status=400))
    assert listener.told == []
