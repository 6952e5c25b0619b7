"""One request for each of the eight capabilities, in the form that its route takes."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from deployments.engines.audio import sound
from models import shapes
from tests.support.drawings import uri
from tests.support.speech import SENTENCES, form, wav

ANSWER_S = 120.0  # a request may wait for a load, and that for others
HELLO = [{"role": "user", "content": "Who holds the memory?"}]
FACT = shapes.Fact("red", "circle", "blue")
PICTURE = uri(shapes.draw(FACT))
LOOK = [
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": PICTURE}},
            {"type": "text", "text": "Describe this picture."},
        ],
    }
]
SENTENCE = SENTENCES[0]
TOKENS = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Call:
    """A request without the name of its model."""

    path: str
    fields: Mapping[str, Any]
    file: bytes | None = None  # with one the request is a form

    def body(self, model: str) -> tuple[bytes, str]:
        """Bytes, and their content type."""
        if self.file is not None:
            return form(self.file, model=model, **self.fields)
        return json.dumps({"model": model, **self.fields}).encode(), "application/json"

    def streamed(self, tokens: int) -> "Call":
        """The same request for tokens, answered as they come."""
        return replace(self, fields={**self.fields, "stream": True, "max_tokens": tokens})


SPEECH = Call("/v1/audio/speech", {"input": SENTENCE, "response_format": "wav"})


def calls(heard: bytes) -> dict[str, Call]:
    """By capability. `heard`: a file of speech."""
    return {
        "chat": Call("/v1/chat/completions", {"messages": HELLO, **TOKENS}),
        "embedding": Call("/v1/embeddings", {"input": "a ticket"}),
        "rerank": Call("/v1/rerank", {"query": "memory", "documents": ["RAM", "a cat"]}),
        "vision": Call("/v1/chat/completions", {"messages": LOOK, **TOKENS}),
        "asr": Call("/v1/audio/transcriptions", {"language": "en"}, heard),
        "tts": SPEECH,
        "vad": Call("/v1/audio/vad", {}, heard),
        "image": Call("/v1/images/generations", {"prompt": FACT.caption, "x_seed": 3}),
    }


def answer(url: str, call: Call, model: str) -> tuple[bytes, float]:
    """What one request got, and seconds until all of it was there. Raises RuntimeError for a
    refusal."""
    body, kind = call.body(model)
    request = urllib.request.Request(url + call.path, body, {"content-type": kind})
    start = time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as said:
            return said.read(), time.perf_counter() - start
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{model}: {error.code}, {error.read()[:300]!r}") from error


def spoken(url: str, voice: str) -> bytes:
    """A sentence that the graph itself read aloud: WAV at the rate that models listen to."""
    raw, _ = answer(url, SPEECH, voice)
    samples = sound.decode(raw, most_s=60)
    return wav(sound.floats(samples), sound.HEARD_HZ)


def models_of(table: Mapping[str, Any]) -> dict[str, str]:
    """The first model of each capability, in the order of a front's `user_config`."""
    return {name: next(iter(row["models"])) for name, row in table["capabilities"].items()}
