"""What all slabs of an engine of vLLM have in common: how they are held open, what tells apart the
weights that made their rows, and how their rows are mapped.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from vllm.config import VllmConfig

from arbiter.pool import SlabFile, SlabUnusable, layout
from arbiter.units import KIB, MIB, Bytes
from deployments.engines.protocol import Config

_DIGESTED_BYTES = MIB  # read at the begin and at the end of each file of weights
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
_ALIGNED_BYTES = 4 * KIB  # rows begin on kernel pages


def hold(path: str) -> str:
    """Opens a slab, and keeps it open for as long as this process lives. Returns the path of the
    open descriptor, at which the core and its workers find the slab even if its owner ends
    meanwhile. Raises SlabUnusable."""
    slab = SlabFile(path)
    held = f"/proc/{os.getpid()}/fd/{os.dup(slab.fd)}"
    slab.close()
    return held


def hold_configured(extra: dict[str, Any]) -> str | None:
    """Holds the slab of a connector's configuration. Returns why it cannot be used."""
    try:
        extra["slab"] = hold(extra["slab"])
    except SlabUnusable as error:
        return str(error)
    return None


def whole_pages(size: int) -> Bytes:
    """The size of a row for so many bytes."""
    return Bytes(-(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES)


def refuse_embeddings(vllm_config: VllmConfig, config: Config) -> None:
    """Has an engine with a connector refuse embeddings in place of pictures, unless it was
    configured to take them: vLLM has every engine with a connector accept them."""
    pictures = vllm_config.model_config.multimodal_config
    if pictures is not None and not config.get("engine_args", {}).get("enable_mm_embeds"):
        pictures.enable_mm_embeds = pictures.allow_missing_mm_embeddings = False


def weights_digest(source: Path) -> str | None:
    """The digest of a folder's files of weights, or of one file: names, sizes, times of change, and
    the begin and the end of each. None where there are none."""
    files = [source] if source.is_file() else sorted(source.glob("*"))
    weights = [path for path in files if path.suffix in _WEIGHTS]
    digest = hashlib.sha256()
    for path in weights:
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns} ".encode())
        with path.open("rb") as stream:
            digest.update(stream.read(_DIGESTED_BYTES))
            stream.seek(max(0, status.st_size - _DIGESTED_BYTES))
            digest.update(stream.read(_DIGESTED_BYTES))
    return digest.hexdigest() if weights else None


def mapped_rows(file: SlabFile, row_bytes: Bytes) -> np.ndarray:
    """The rows of a slab, int8 of shape [rows, bytes of a row]. They are not pinned: pinning gives
    every page memory, beyond the slab's limit."""
    shape = layout.geometry(file.capacity, row_bytes)
    flat = np.frombuffer(file.buffer, np.int8, shape.rows_count * row_bytes, shape.data_offset)
    return flat.reshape(shape.rows_count, row_bytes)
