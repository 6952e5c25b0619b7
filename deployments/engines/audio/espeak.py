"""libespeak-ng by ctypes, from the wheel `espeakng_loader`: phonemes for voices of neural models,
and a voice that needs no model.

The library keeps its state in globals: one instance per process, called by one thread. Text is
plain: its markup, in which `<audio src=...>` would read a file, stays off.
Source: github.com/espeak-ng/espeak-ng, src/include/espeak-ng/speak_lib.h.
"""

import ctypes
import re
from typing import Any

import espeakng_loader
import numpy as np

_SYNCHRONOUS, _NO_EXIT = 2, 0x8000  # AUDIO_OUTPUT_SYNCHRONOUS, espeakINITIALIZE_DONT_EXIT
_UTF8, _IPA, _RATE = 1, 2, 1  # espeakCHARS_UTF8, phonememode, espeakRATE
_BUFFER_MS = 200
WORDS_PER_MINUTE, WORDS_LEAST, WORDS_MOST = 175, 80, 450  # its ordinary pace, and its bounds
# A language as `en-us`; the library takes paths as well, which must not come from a client.
_NAME = re.compile(r"[a-z]{2,3}(-[a-z0-9]{1,8}){0,4}")
_ON_SOUND = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
)


class NoSuchVoice(ValueError):
    """The library has no voice of that name."""


class Espeak:
    """The library, started. Raises RuntimeError where it cannot be."""

    def __init__(self) -> None:
        self._library: Any = ctypes.CDLL(espeakng_loader.get_library_path())
        self._library.espeak_TextToPhonemes.restype = ctypes.c_char_p
        folder = str(espeakng_loader.get_data_path()).encode()
        self.rate_hz: int = self._library.espeak_Initialize(
            _SYNCHRONOUS, _BUFFER_MS, folder, _NO_EXIT
        )
        if self.rate_hz <= 0:
            raise RuntimeError(f"libespeak-ng did not start with the data in {folder!r}")
        self._voice = ""

    def choose(self, voice: str) -> None:
        """Sets the voice of all that follows. Raises NoSuchVoice."""
        if voice == self._voice:
            return
        is_known = _NAME.fullmatch(voice) and not self._library.espeak_SetVoiceByName(
            voice.encode()
        )
        if not is_known:
            raise NoSuchVoice(voice)
        self._voice = voice

    def phonemes(self, text: str) -> str:
        """The phonemes of a text in IPA, without punctuation."""
        parts, rest = [], ctypes.c_char_p(text.encode())
        while rest.value is not None:  # a call reads up to the end of a clause
            phonemes = self._library.espeak_TextToPhonemes(ctypes.byref(rest), _UTF8, _IPA)
            parts.append((phonemes or b"").decode())
        return " ".join(part for part in parts if part)

    def speak(self, text: str, speed: float) -> np.ndarray:
        """float32 samples in [-1, 1], shape [n], at `rate_hz`."""
        parts: list[np.ndarray] = []

        def take(wave: Any, count: int, _: Any) -> int:
            if count:
                parts.append(np.ctypeslib.as_array(wave, (count,)).copy())
            return 0

        callback = _ON_SOUND(take)
        self._library.espeak_SetSynthCallback(callback)
        words = min(WORDS_MOST, max(WORDS_LEAST, round(WORDS_PER_MINUTE * speed)))
        self._library.espeak_SetParameter(_RATE, words, 0)
        raw = text.encode()
        self._library.espeak_Synth(
            ctypes.c_char_p(raw), ctypes.c_size_t(len(raw) + 1), 0, 1, 0, _UTF8, None, None
        )
        if not parts:
            return np.zeros(0, np.float32)
        return np.concatenate(parts).astype(np.float32) / 32_768.0
