"""Speech from models of Kokoro's class (StyleTTS 2) on onnxruntime, in OpenAI's shapes.

`engine_args`: `device`, `threads`, `phrases` and `voices` (further names: `{alloy: af_heart}`) as
of the engine `vits`; `language` (of the texts, as espeak-ng names it; default en-us).

A model is a folder with one .onnx graph, Kokoro's own `config.json`, whose `vocab` has the id of
each character of IPA, and one .npz (kokoro-onnx names it .bin) with an array of styles for each
voice, by its name: float32 [lengths, 1, 256], of which a text of n tokens is spoken with the n-th.
Source: huggingface.co/hexgrad/Kokoro-82M, github.com/thewh1teagle/kokoro-onnx.
"""

import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from deployments.config.voice_files import ESPEAK_DEFAULT, kokoro_files
from deployments.engines.audio.espeak import Espeak
from deployments.engines.audio.vits import SpeechEngine
from deployments.engines.audio.voices import (
    Voice,
    named,
    open_session,
    phonemes_of,
    run_phonemes,
    runs,
)
from deployments.engines.one_thread import compute_threads
from deployments.engines.protocol import Config, EngineLoadFailed

RATE_HZ = 24_000
PAD = 0  # before and after a text
MOST_TOKENS = 510  # the encoder of text has 512 positions, of which two are pads
STYLE = (1, 256)
MOST_STYLES_BYTES = 256 << 20  # some 500 voices

# What espeak-ng writes where a word is of another language; each character of it has a sound.
_LANGUAGE = re.compile(r"\([a-z-]+\)")


def build(config: Config) -> SpeechEngine:
    return SpeechEngine(config, open_voice)


def open_voice(config: Config) -> Voice:
    args = config.get("engine_args", {})
    return KokoroVoice(Path(config["model"]), Espeak(), args, compute_threads(config))


class KokoroVoice:
    """One graph, and the styles of all its voices."""

    rate_hz = RATE_HZ

    def __init__(self, model: Path, espeak: Espeak, args: dict[str, Any], threads: int) -> None:
        """Raises ConfigError, EngineLoadFailed, NoSuchVoice."""
        files = kokoro_files(model)
        self._ids, self._styles = read_vocabulary(files.vocabulary), read_styles(files.styles)
        further: dict[str, str] = args.get("voices", {})
        for name, voice in further.items():
            if voice not in self._styles:
                raise _bad(files.styles, f"no voice {voice!r}, which `voices` calls {name!r}")
        self._names = {name: name for name in self._styles} | further
        self._espeak = espeak
        self._espeak.choose(args.get("language", ESPEAK_DEFAULT))
        # Else a clause of 11 s takes 1.6 GB more than the open graph, instead of 0.22.
        self._session = open_session(files.graph, args.get("device"), threads, keeps_memory=True)
        inputs = [graph_input.name for graph_input in self._session.get_inputs()]
        if inputs not in (["tokens", "style", "speed"], ["input_ids", "style", "speed"]):
            raise _bad(files.graph, f"not Kokoro's: its inputs are {', '.join(inputs)}")
        self._tokens = inputs[0]

    def name_of(self, voice: str) -> str:
        return named(voice, self._names)

    def clause(self, text: str) -> list[int] | None:
        phonemes = _LANGUAGE.sub("", phonemes_of(self._espeak, text))
        in_table = [c for c in phonemes if c in self._ids]
        return [self._ids[c] for c in in_table] if any(c.isalpha() for c in in_table) else None

    def speak(self, clause: Any, voice: str, speed: float) -> Iterator[np.ndarray]:
        border = [self._ids[" "]] if " " in self._ids else []
        for run in runs(clause, min(MOST_TOKENS, run_phonemes(speed)), border):
            yield self._spoken(run, voice, speed)

    def _spoken(self, tokens: list[int], voice: str, speed: float) -> np.ndarray:
        styles = self._styles[voice]
        feed = {
            self._tokens: np.array([[PAD, *tokens, PAD]], np.int64),
            "style": styles[min(len(tokens), len(styles)) - 1],
            "speed": np.array([speed], np.float32),
        }
        samples: np.ndarray = self._session.run(None, feed)[0].reshape(-1)
        return samples


def read_vocabulary(file: Path) -> dict[str, int]:
    """Raises EngineLoadFailed."""
    try:
        vocabulary = json.loads(file.read_text("utf-8"))["vocab"]
        return {str(character): int(number) for character, number in vocabulary.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _bad(file, f"no `vocab` of characters and their ids ({error})") from error


def read_styles(file: Path) -> dict[str, np.ndarray]:
    """The style vectors by the name of the voice. Raises EngineLoadFailed."""
    try:
        with zipfile.ZipFile(file) as packed:
            size_bytes = sum(one.file_size for one in packed.infolist())
        if size_bytes > MOST_STYLES_BYTES:
            raise _bad(file, f"{size_bytes} bytes of styles, more than {MOST_STYLES_BYTES}")
        with np.load(file, allow_pickle=False) as arrays:
            styles = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        raise _bad(file, f"no file of styles ({error})") from error
    for name, style in styles.items():
        right = isinstance(style, np.ndarray) and style.dtype == np.float32 and style.ndim == 3
        if not right or style.shape[1:] != STYLE or not len(style):
            raise _bad(file, f"voice {name!r} is not float32 [lengths, 1, 256]")
    if not styles:
        raise _bad(file, "no voices")
    return styles


def _bad(file: Path, why: str) -> EngineLoadFailed:
    return EngineLoadFailed("BadModel", f"{file}: {why}", False)
