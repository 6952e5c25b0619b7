"""The mixed hour: what is asked when. Every system is asked the same, byte for byte."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.calls import LOOK, Call
from models import shapes

# Of one hour, before it is scaled: bursts, and requests in each.
RATES = {
    "voice": (14, 1),
    "chat": (24, 3),
    "embedding": (14, 5),
    "rerank": (14, 1),
    "image": (14, 1),
    "vision": (14, 1),
}
BATCH_REQUESTS, BATCH_BEGINS, BATCH_AT_ONCE = 60, 0.3, 4
GAP_S = 2.0  # between the requests of one burst, on the mean
ADAPTERS = ("upper", "reverse", "title")  # of small-chat's, the first the most called
QUESTIONS = (
    "What is a ticket?",
    "Who owns the memory of a device?",
    "When does a model leave?",
    "What does the node agent do?",
)


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that a user does. `calls`: capability, what `model` says, request; a voice turn is
    several, of which each waits for the one before it."""

    at_s: float
    kind: str
    calls: tuple[tuple[str, str, Call], ...]


def chat(question: str, tokens: int = 32) -> Call:
    said: dict[str, Any] = {"messages": [{"role": "user", "content": question}]}
    return Call(
        "/v1/chat/completions", {**said, "max_tokens": tokens, "temperature": 0, "stream": True}
    )


class Hour:
    """The items of one seed, in the order of their times. `models` by capability, `heard`: a spoken
    question as a file."""

    def __init__(self, seed: int, length_s: float, models: dict[str, str], heard: bytes) -> None:
        self._dice, self._length_s = random.Random(seed), length_s
        self._models, self._heard = models, heard

    def items(self) -> list[Item]:
        items = [item for kind in RATES for item in self._of(kind)]
        return sorted(items, key=lambda item: item.at_s)

    def batch(self) -> tuple[float, list[Call]]:
        """When it is handed in, and its requests."""
        calls = [chat(self._dice.choice(QUESTIONS), 48) for _ in range(BATCH_REQUESTS)]
        return BATCH_BEGINS * self._length_s, calls

    def _of(self, kind: str) -> Iterator[Item]:
        bursts, length = RATES[kind]
        for _ in range(bursts):
            at_s = self._dice.uniform(0, self._length_s)
            for _ in range(length):
                yield Item(at_s, kind, self._calls(kind))
                at_s += self._dice.expovariate(1 / GAP_S)

    def _calls(self, kind: str) -> tuple[tuple[str, str, Call], ...]:
        dice = self._dice
        if kind == "voice":
            return (
                self._one("vad", Call("/v1/audio/vad", {}, self._heard)),
                self._one("asr", Call("/v1/audio/transcriptions", {"language": "en"}, self._heard)),
                self._one("chat", chat(QUESTIONS[0])),
                self._one("tts", speech("A ticket is the right to load one model.")),
            )
        if kind == "chat":
            base = self._models["chat"]
            weights = (6, *(6 / (n + 2) for n in range(len(ADAPTERS))))
            names = (base, *(f"{base}:{adapter}" for adapter in ADAPTERS))
            model = dice.choices(names, weights)[0]
            return (("chat", model, chat(dice.choice(QUESTIONS))),)
        if kind == "embedding":
            return (self._one("embedding", Call("/v1/embeddings", {"input": "a ticket"})),)
        if kind == "rerank":
            fields: dict[str, Any] = {"query": "memory", "documents": ["RAM", "a cat", "a lease"]}
            return (self._one("rerank", Call("/v1/rerank", fields)),)
        if kind == "vision":
            fields = {"messages": LOOK, "max_tokens": 8, "temperature": 0, "stream": True}
            return (self._one("vision", Call("/v1/chat/completions", fields)),)
        fact = shapes.Fact("red", "circle", "blue")
        fields = {"prompt": fact.caption, "x_seed": dice.randrange(1000)}
        return (self._one("image", Call("/v1/images/generations", fields)),)

    def _one(self, capability: str, call: Call) -> tuple[str, str, Call]:
        return capability, self._models[capability], call


def speech(text: str) -> Call:
    return Call("/v1/audio/speech", {"input": text, "response_format": "pcm"})
