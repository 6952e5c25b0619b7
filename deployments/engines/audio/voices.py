"""What speaks: VITS voices of Piper's format on onnxruntime, and espeak-ng's own."""

import json
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from deployments.config.voice_files import ESPEAK_DEFAULT, describing, speakers, voice_file
from deployments.engines.asgi import BadField
from deployments.engines.audio.espeak import Espeak, NoSuchVoice
from deployments.engines.audio.ready_graphs import open_graph
from deployments.engines.protocol import EngineLoadFailed

# A clause, of which the first is waited for. What is spoken at once has the bound below.
CLAUSE_CHARACTERS = 150
# What a model speaks at once at its usual speed: a clause of prose has 165 phonemes, but 40 signs
# that are spelt out have 600. Time and memory grow with the sound, which is longer where it is
# slower: 10 s of it take VITS a second of one core and 280 MiB.
RUN_PHONEMES = 200
NAMES_TOLD = 20  # of the voices there are, in a message

_SENTENCES = re.compile(r"(?<=[.!?;:\n])\s+")
_MARKS = re.compile(r"([,.;:!?]+)(?=\s|$)")


class Voice(Protocol):
    """One or several voices of one model. Every method is called in the engine's one thread."""

    rate_hz: int

    def name_of(self, voice: str) -> str:
        """Returns the model's own name of the voice that a client named; an empty text names the
        default. Raises BadField."""

    def clause(self, text: str) -> Any:
        """Returns a text in the form that `speak` takes; None where it has nothing that is
        spoken."""

    def speak(self, clause: Any, voice: str, speed: float) -> Iterator[np.ndarray]:
        """Yields float32 samples in [-1, 1], shape [n], of a bounded part of the clause each."""


class VitsVoice:
    """One .onnx file of Piper's format."""

    def __init__(self, model: Path, espeak: Espeak, args: dict[str, Any], threads: int) -> None:
        file = voice_file(model)
        self._config = json.loads(describing(file).read_text())
        self._ids: dict[str, list[int]] = self._config["phoneme_id_map"]
        self.rate_hz: int = self._config["audio"]["sample_rate"]
        self._noise = args.get("noise")
        self._espeak = espeak
        self._espeak.choose(self._config["espeak"]["voice"])
        self._speakers = speakers(file, self._config)
        self._names = {name: name for name in self._speakers} | args.get("voices", {})
        unknown = [name for name, one in self._names.items() if one not in self._speakers]
        if unknown and len(self._speakers) > 1:
            why = f"engine_args: `voices` calls {unknown[0]!r} what is no speaker of {file}"
            raise EngineLoadFailed("BadConfig", why, False)
        self._session = open_session(file, args.get("device"), threads)

    def name_of(self, voice: str) -> str:
        return named(voice, self._names)

    def clause(self, text: str) -> list[int] | None:
        """Phonemes as ids, each followed by a pad, as such a voice was trained with."""
        phonemes = phonemes_of(self._espeak, text)
        in_table = [c for c in unicodedata.normalize("NFD", phonemes) if c in self._ids]
        if not any(c.isalpha() for c in in_table):
            return None
        ids = [*self._ids["^"], *self._ids["_"]]
        for character in in_table:
            ids += [*self._ids[character], *self._ids["_"]]
        return [*ids, *self._ids["$"]]

    def speak(self, clause: Any, voice: str, speed: float) -> Iterator[np.ndarray]:
        begin, pad, end = (self._ids[mark] for mark in "^_$")
        border = [*self._ids[" "], *pad] if " " in self._ids else []
        phonemes = clause[len(begin) + len(pad) : -len(end)]
        for run in runs(phonemes, 2 * run_phonemes(speed), border):
            yield self._spoken([*begin, *pad, *run, *end], voice, speed)

    def _spoken(self, ids: list[int], voice: str, speed: float) -> np.ndarray:
        usual = self._config["inference"]
        noise = (
            (usual["noise_scale"], usual["noise_w"]) if self._noise is None else (self._noise,) * 2
        )
        feed = {
            "input": np.array([ids], np.int64),
            "input_lengths": np.array([len(ids)], np.int64),
            "scales": np.array([noise[0], usual["length_scale"] / speed, noise[1]], np.float32),
        }
        if len(self._speakers) > 1:
            feed["sid"] = np.array([self._speakers[voice]], np.int64)
        samples: np.ndarray = self._session.run(None, feed)[0].reshape(-1)
        return samples


class EspeakVoice:
    """espeak-ng's own voices, by language."""

    def __init__(self, espeak: Espeak, voices: dict[str, str]) -> None:
        self._espeak, self._names = espeak, voices
        self.rate_hz = espeak.rate_hz

    def name_of(self, voice: str) -> str:
        name = self._names.get(voice, voice) or ESPEAK_DEFAULT
        try:
            self._espeak.choose(name)
        except NoSuchVoice:
            text = f"`voice` {voice!r} is none of espeak-ng's; write a language, as `en-us` or `de`"
            raise BadField("voice", text) from None
        return name

    def clause(self, text: str) -> str | None:
        """Returns the text itself, because espeak-ng speaks signs such as `%` by their names."""
        return text if any(c.isalpha() for c in phonemes_of(self._espeak, text)) else None

    def speak(self, clause: Any, voice: str, speed: float) -> Iterator[np.ndarray]:
        self._espeak.choose(voice)
        yield self._espeak.speak(clause, speed)


def phonemes_of(espeak: Espeak, text: str) -> str:
    """Returns the phonemes of a text, with its punctuation. espeak-ng drops punctuation, which
    neural models need for pauses and melody, so it is put back."""
    words_and_marks, parts = [*_MARKS.split(text), ""], []
    for words, mark in zip(words_and_marks[::2], words_and_marks[1::2], strict=True):
        if phonemes := espeak.phonemes(words.strip()) if words.strip() else "":
            parts.append(f"{phonemes}{mark[-1:]}")
    return " ".join(parts)


def open_session(
    file: Path, device: str | None, threads: int, *, keeps_memory: bool = False
) -> Any:
    """Opens a graph in onnxruntime. `keeps_memory`: onnxruntime keeps the memory of one clause for
    the next, and of one step for another.

    onnxruntime is imported here: it starts a thread, and a zygote must have none."""
    import onnxruntime

    def settings() -> Any:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.enable_cpu_mem_arena, options.enable_mem_pattern = keeps_memory, False
        # With it Piper's graphs take 4-5 s of processor time to open instead of 1; memory is the
        # same.
        options.enable_mem_reuse = keeps_memory
        # A thread without work must not spin on a core that others need.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        return options

    provider = "CPUExecutionProvider" if device == "cpu" else "CUDAExecutionProvider"
    available = onnxruntime.get_available_providers()
    if device == "cuda" and provider not in available:
        raise EngineLoadFailed("NoDevice", "`device: cuda` takes onnxruntime-gpu", False)
    providers = [one for one in (provider, "CPUExecutionProvider") if one in available]
    return open_graph(file, settings, providers)


def named(voice: str, names: dict[str, str]) -> str:
    """The voice behind a name; without one the first. Raises BadField."""
    if not voice:
        return next(iter(names.values()))
    if voice not in names:
        known_names = ", ".join(sorted(names)[:NAMES_TOLD])
        raise BadField("voice", f"`voice` {voice!r} is not known; there is: {known_names}")
    return names[voice]


def clauses_of(text: str) -> Iterator[str]:
    """Sentences, and parts of those that are long."""
    for sentence in _SENTENCES.split(text.strip()):
        rest = sentence.strip()
        while len(rest) > CLAUSE_CHARACTERS:
            head = rest[:CLAUSE_CHARACTERS]
            cut = head.rfind(", ") + 1 or head.rfind(" ") + 1 or CLAUSE_CHARACTERS
            yield rest[:cut].strip()
            rest = rest[cut:].strip()
        if rest:
            yield rest


def run_phonemes(speed: float) -> int:
    """Returns how many phonemes a model speaks at once at a speed."""
    return int(RUN_PHONEMES * speed)


def runs(ids: list[int], most_count: int, border: list[int]) -> Iterator[list[int]]:
    """Yields parts of at most `most_count` ids, which end with a border where there is one."""
    begin = 0
    while begin < len(ids):
        end = begin + most_count
        if end < len(ids):
            borders = (i for i in range(end, begin, -1) if ids[i - len(border) : i] == border)
            end = next(borders, end)
        yield ids[begin:end]
        begin = end
