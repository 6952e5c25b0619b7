"""Rounds an adapter's weights to 8 bits when it is published, if its entry asks for that.

Each row of a matrix has one scale, its largest value / 127. The rounded values replace the old ones
in the copy, in the type of the file: so the copy's digest covers them, and all that is made of it,
on disk, in the pool and in a slot, gives the same answers (F3).
"""

from pathlib import Path
from typing import Any

import numpy as np

from deployments.config import safetensors_header

_STEPS = 127  # steps on either side of 0
_INTEGERS: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<u4"),
    "F16": np.dtype("<u2"),
    "BF16": np.dtype("<u2"),
}


def round_weights(file: Path) -> None:
    """Rewrites the tensors of a safetensors file that has been checked: F32, F16 and BF16 of two
    dimensions. Raises OSError."""
    with file.open("r+b") as stream:
        data_at = 8 + int.from_bytes(stream.read(8), "little")
        for tensor in safetensors_header.read(file).values():
            stream.seek(data_at + tensor.start)
            raw = np.frombuffer(stream.read(tensor.size_bytes), _INTEGERS[tensor.dtype])
            values = _rounded(_floats(raw, tensor.dtype).reshape(tensor.shape))
            stream.seek(data_at + tensor.start)
            stream.write(_raw(values.reshape(-1), tensor.dtype).tobytes())


def _rounded(values: np.ndarray) -> np.ndarray:
    """Shape [rows, columns], float32."""
    most = np.abs(values).max(axis=1, keepdims=True)
    scales = np.where(most > 0, most, 1.0).astype(np.float32) / np.float32(_STEPS)
    rounded: np.ndarray = np.rint(values / scales) * scales
    return rounded


def _floats(raw: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":  # the upper half of a float32
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.view(np.float16 if dtype == "F16" else np.float32).astype(np.float32)


def _raw(values: np.ndarray, dtype: str) -> np.ndarray:
    """Rounds to the nearest value of the type, to the even one between two."""
    if dtype == "BF16":
        bits = values.astype(np.float32).view(np.uint32)
        rounded: np.ndarray = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return rounded
    return values.astype(np.float16 if dtype == "F16" else np.float32)
