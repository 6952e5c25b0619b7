"""Voice activity detection: sound in, spans of speech out."""

import json
import time

from arbiter.core import events as ev
from deployments import messages
from deployments.replica.capability import Capability

# A client that listens sends one piece of sound after the other while a person speaks.
QUIET_S = 30.0


class VadServer(Capability):
    """Tells the arbiter that a person has begun to speak, so that the models behind it in a
    pipeline get ready (G1)."""

    paths = frozenset({"/v1/vad", "/v1/audio/vad"})

    def __init__(self, capability: str) -> None:
        super().__init__(capability)
        self._speech_until_s = 0.0  # until then speech is the same person's, still speaking

    def note_answer(self, call: messages.InferenceCall, response: messages.FullResponse) -> None:
        """Tells of speech at most once in QUIET_S."""
        now_s = time.monotonic()
        if hears_speech(response) and now_s >= self._speech_until_s:
            self._residency.client().tell(ev.SpeechStarted(self._residency.holder))
            self._speech_until_s = now_s + QUIET_S


def hears_speech(response: messages.FullResponse) -> bool:
    """Whether an answer of the engine has a span of speech in it."""
    return response.head.status == 200 and bool(json.loads(response.body).get("segments"))
