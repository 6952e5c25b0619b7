"""What a model's files say of its bytes before any load (A17): weights, and slots for adapters."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arbiter.core.records import estimates
from arbiter.units import GIB, Bytes
from deployments.config import safetensors_header
from deployments.config.model_section import ModelConfig
from deployments.config.schema import ConfigError

# vLLM's default number of sequences in a batch; more slots than sequences serve no request.
DEFAULT_SEQUENCES = 128
# Of vLLM, for a model that sees: its cache of processed pictures, in the process that answers (by
# default 4 GiB), and the most embeddings of pictures that its core keeps, which are the
# most tokens of one step. 8,192 is the default on large GPUs; others keep fewer.
PROCESSED_GIB, MOST_EMBEDDINGS = 0.05, 8_192
EMBEDDING_BYTES = 4  # of a number in float32; half of it in the precision of most models
# `model.fp16.safetensors` beside `model.safetensors`: the same tensors in another precision, of
# which a library loads one (diffusers, "variants").
_VARIANT = re.compile(r"\.(fp16|bf16|fp32)(?=[.-])")


def weights_bytes(source: Path) -> Bytes:
    """Sum of all tensors in the folder's safetensors headers, those of nested folders included;
    without any, an estimate from the sizes of other files, or from the name. Raises ConfigError
    when neither says anything, or a header is broken."""
    try:
        sizes: dict[str, int] = {}
        for file in _tensor_files(source):
            size = sum(tensor.size_bytes for tensor in safetensors_header.read(file).values())
            name = _VARIANT.sub("", str(file))
            sizes[name] = max(size, sizes.get(name, 0))
    except safetensors_header.BadHeader as error:
        raise ConfigError(str(error)) from error
    if sizes:
        return Bytes(sum(sizes.values()))
    size_bytes = estimates.of_files(_file_sizes(source)) or estimates.of_name(str(source))
    if size_bytes is None:
        raise ConfigError(f"{source}: no .safetensors here; give the model a `need`")
    return size_bytes


def _tensor_files(source: Path) -> list[Path]:
    """Lists the tensor files of a model in one file, or in a folder."""
    if source.is_file():
        return [source] if source.suffix == ".safetensors" else []
    return _tensor_files_in(source)


def _tensor_files_in(folder: Path) -> list[Path]:
    """A pipeline of diffusers lists the folders of its parts (`unet`, `vae`, ...) in its index, and
    a file beside the index is the whole pipeline once more. In any other folder the files at its
    top are the model, where an index lists them no others, and nested folders (`original`, `onnx`)
    are other forms of it; they count only where the top has none. Raises ConfigError."""
    if parts := _parts_of_pipeline(folder):
        return [file for part in parts for file in sorted((folder / part).glob("*.safetensors"))]
    listed = _listed(folder)
    top = [f for f in sorted(folder.glob("*.safetensors")) if not listed or f.name in listed]
    return top or sorted(folder.rglob("*.safetensors"))


def _listed(folder: Path) -> set[str]:
    """The files that a model's index lists; some models lie beside them in another form, as one
    `consolidated.safetensors`. Raises ConfigError."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return set()
    try:
        return set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index}: not the index of a model: {error!r}") from error


def _parts_of_pipeline(folder: Path) -> list[str]:
    """Raises ConfigError."""
    index = folder / "model_index.json"
    if not index.is_file():
        return []
    try:
        parts = json.loads(index.read_text())
        return [name for name, kind in parts.items() if isinstance(kind, list)]
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{index}: not the index of a pipeline: {error}") from error


def _file_sizes(source: Path) -> dict[str, int]:
    """Returns the sizes of files, of a model in one file, or in folders of a folder; empty for a
    hub id."""
    if source.is_file():
        return {source.name: source.stat().st_size}
    files = (path for path in source.rglob("*") if path.is_file())
    return {str(path.relative_to(source)): path.stat().st_size for path in files}


def adapted_folder(model: Path) -> Path:
    """The part of a model that adapters change: of a pipeline of diffusers its UNet or transformer,
    of any other model the whole."""
    parts = (model / "unet", model / "transformer")
    is_pipeline = (model / "model_index.json").is_file()
    return next((part for part in parts if is_pipeline and part.is_dir()), model)


def slot_size(path: str, max_rank: int) -> int:
    """Bytes of one adapter slot. Raises ConfigError."""
    try:
        shapes = safetensors_header.linear_shapes(adapted_folder(Path(path)))
        return safetensors_header.slot_bytes(shapes, max_rank)
    except (safetensors_header.BadHeader, OSError) as error:
        raise ConfigError(str(error)) from error


def adapter_slots(path: str, model: ModelConfig) -> int:
    """The slots for adapters: as many as configured; else as many as their share of the weights'
    bytes pays for. Raises ConfigError."""
    section = model.adapters
    assert section is not None
    if section.slots:
        return section.slots
    most = _count(model.engine_args, "max_num_seqs", DEFAULT_SEQUENCES)
    share_bytes = int(weights_bytes(Path(path)) * section.slot_share)
    return max(1, min(most, share_bytes // slot_size(path, section.max_rank)))


def sees(source: Path) -> bool:
    """Whether the model takes pictures, by its configuration. A hub id is not looked into."""
    return "vision_config" in _configuration(source)


def picture_bytes(source: Path, arguments: Mapping[str, Any]) -> Bytes:
    """What vLLM's caches of pictures may hold; 0 for a model that takes none. Raises
    ConfigError."""
    config = _configuration(source)
    if "vision_config" not in config:
        return Bytes(0)
    wide = config.get("text_config", config).get("hidden_size", 0)
    embeddings = _count(arguments, "max_num_batched_tokens", MOST_EMBEDDINGS)
    processed_bytes = _count(arguments, "mm_processor_cache_gb", PROCESSED_GIB, GIB)
    return Bytes(processed_bytes + embeddings * wide * EMBEDDING_BYTES)


def _count(arguments: Mapping[str, Any], key: str, usual: float, unit: int = 1) -> int:
    """An argument of an engine in whole things, of which `unit` are one of what it counts. Raises
    ConfigError."""
    value = arguments.get(key, usual)
    try:
        count = int(float(value) * unit)
    except (TypeError, ValueError, OverflowError):
        count = -1
    if count < 0:
        raise ConfigError(f"`engine_args.{key}`: {value!r} is no number from 0 on, as {usual} is")
    return count


def context_tokens(source: Path, model: ModelConfig) -> int | None:
    """The most tokens that a model reads at once: as its engine is told, else as its files say;
    None where neither does, as for a hub id or a model of sound."""
    config = _configuration(source)
    text = config.get("text_config")
    lengths = (
        model.grow_to.get("max_model_len"),
        model.engine_args.get("max_model_len"),
        _configuration(source, "sentence_bert_config.json").get("max_seq_length"),
        (text if isinstance(text, dict) else config).get("max_position_embeddings"),
    )
    return next((tokens for tokens in lengths if isinstance(tokens, int)), None)


def _configuration(source: Path, name: str = "config.json") -> dict[str, Any]:
    try:
        config = json.loads((source / name).read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
