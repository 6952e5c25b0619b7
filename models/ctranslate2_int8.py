"""Writes a Whisper model of CTranslate2 with its weights in int8.

CTranslate2 converts weights of float16 to int8 with each load on a CPU, which is most of the load;
a file that has them in int8 is read as it is. Its own converter begins with the checkpoint of
`transformers`, so a model that is there in CTranslate2's format only is read here, and what
quantises and writes it is CTranslate2's.
Format of model.bin: `ModelSpec._serialize` of ctranslate2/specs/model_spec.py, version 6.
"""

import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np

BINARY_VERSION, WHISPER = 6, "WhisperSpec"
_WEIGHTS = "model.bin"
_DTYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)  # by the format's number


class OtherFormat(ValueError):
    """The file is none that can be read here."""


def convert_whisper(source: Path, target: Path) -> None:
    """Writes the model in `source` to `target`, a folder without files. Raises OtherFormat,
    OSError."""
    from ctranslate2.specs import model_spec, whisper_spec  # and with it torch

    values, aliases = read(source / _WEIGHTS)
    layers = [_layers_count(values, side) for side in ("encoder", "decoder")]
    heads = [int(values[f"{side}/num_heads"]) for side in ("encoder", "decoder")]
    spec: Any = whisper_spec.WhisperSpec(layers[0], heads[0], layers[1], heads[1])
    unset = values | {alias: values[name] for alias, name in aliases.items()}

    def fill(part: Any, name: str, _declared: object) -> None:
        if name in unset:
            setattr(part, name.rsplit("/", 1)[-1], unset.pop(name))

    model_spec.visit_spec(spec, fill)
    if unset:
        raise OtherFormat(
            f"{source}: {len(unset)} weights are none of Whisper's: {min(unset)}, ..."
        )
    # Those of the class between ask for a vocabulary, which is copied as it is.
    model_spec.LayerSpec.validate(spec)
    spec.optimize("int8")
    model_spec.ModelSpec.save(spec, str(target))
    for file in source.iterdir():
        if file.is_file() and file.name != _WEIGHTS:
            shutil.copyfile(file, target / file.name)


def read(file: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Returns the variables of a model.bin by name, and names that stand for others. Raises
    OtherFormat, OSError."""
    reader = _Reader(file.read_bytes())
    try:
        version, name = reader.number("I"), reader.text()
        reader.number("I")  # the revision of the specification
        if (version, name) == (BINARY_VERSION, WHISPER):
            values = dict(reader.variable() for _ in range(reader.number("I")))
            aliases = {reader.text(): reader.text() for _ in range(reader.number("I"))}
    except (struct.error, IndexError, ValueError) as error:
        raise OtherFormat(f"{file}: broken at byte {reader.at:,}: {error}") from error
    if (version, name) != (BINARY_VERSION, WHISPER):
        raise OtherFormat(f"{file}: {name!r} of version {version}; need {WHISPER!r} of version 6")
    if reader.at != len(reader.raw):
        raise OtherFormat(f"{file}: {len(reader.raw) - reader.at:,} bytes follow its end")
    return values, aliases


class _Reader:
    """Reads values of the format one after the other."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, 0

    def number(self, kind: str) -> int:
        (value,) = struct.unpack_from(f"<{kind}", self.raw, self.at)
        self.at += struct.calcsize(kind)
        return int(value)

    def text(self) -> str:
        """Its length counts the zero at its end."""
        count = self.number("H")
        self.at += count
        return self.raw[self.at - count : self.at - 1].decode()

    def variable(self) -> tuple[str, np.ndarray]:
        name = self.text()
        shape = [self.number("I") for _ in range(self.number("B"))]
        dtype, size = _DTYPES[self.number("B")], self.number("I")
        values = np.frombuffer(self.raw[self.at : self.at + size], dtype).reshape(shape)
        self.at += size
        return name, values.copy()


def _layers_count(values: dict[str, np.ndarray], side: str) -> int:
    layers = {name.split("/")[1] for name in values if name.startswith(f"{side}/layer_")}
    return sum(layer.removeprefix("layer_").isdigit() for layer in layers)
