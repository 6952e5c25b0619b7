"""Checks an adapter's files against what its base model and engine can take (L2)."""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.adapters.catalogue import CONFIG, WEIGHTS
from deployments.adapters.safe_files import MAX_CONFIG_BYTES, AdapterInvalid, read_json
from deployments.config import safetensors_header
from deployments.config.model_files import adapted_folder
from deployments.config.safetensors_header import slot_bytes

_PREFIX = "base_model.model."  # PEFT's, before the module's name in the base
_TYPES = ("F32", "F16", "BF16")
# Each of these features changes what the two matrices mean, so an adapter with it would answer
# wrongly.
_UNSERVED = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "layer_replication",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "trainable_token_indices",
    "megatron_config",
)
# Their keys are regular expressions, which engines match with the name of every module. A repeated
# choice is tried in all ways, for days, and meanwhile no request of any adapter goes on.
_PATTERNS = ("rank_pattern", "alpha_pattern")
_PLAIN_KEY = re.compile(r"\^?(\.\*)?(\w|\\?\.)+(\.\*)?\$?")
HEADER_ROOM_BYTES = 4 << 20  # thousands of tensor names of 100 bytes each


@dataclass(frozen=True, slots=True)
class Rules:
    """What the base model and its engine can take. `shapes`: module to (out, in)."""

    shapes: Mapping[str, tuple[int, int]]
    max_rank: int

    @property
    def bounds(self) -> dict[str, int]:
        """Each file and its most bytes: a valid adapter has at most every module, at the largest
        rank, in float32."""
        weights_bytes = slot_bytes(self.shapes, self.max_rank, item_bytes=4) + HEADER_ROOM_BYTES
        return {CONFIG: MAX_CONFIG_BYTES, WEIGHTS: weights_bytes}


def rules_of(config: Mapping[str, Any]) -> Rules:
    """Those of an engine with this configuration, whose model's headers are read. Raises OSError,
    BadHeader."""
    folder = adapted_folder(Path(config["model"]))
    return Rules(safetensors_header.linear_shapes(folder), config["adapters"]["max_rank"])


def check(name: str, folder: Path, rules: Rules) -> None:
    """Raises AdapterInvalid that says what is wrong with the adapter in `folder`."""
    config, tensors = check_form(name, folder)
    _check_config(name, config, rules.max_rank)
    _check_patterns(name, config, len(rules.shapes))
    pairs: dict[str, dict[str, tuple[int, ...]]] = {}
    for tensor, row in tensors.items():
        module, matrix = parted(name, tensor)
        if row.dtype not in _TYPES:
            raise AdapterInvalid(name, f"{tensor} is {row.dtype}, not one of {', '.join(_TYPES)}")
        pairs.setdefault(module, {})[matrix] = row.shape
    if not pairs:
        raise AdapterInvalid(name, f"{WEIGHTS} has no tensors")
    for module, shapes in pairs.items():
        if reason := _mismatch(shapes, rules.shapes.get(module), rules.max_rank):
            raise AdapterInvalid(name, f"{module}: {reason}")


def check_form(
    name: str, folder: Path
) -> tuple[dict[str, Any], dict[str, safetensors_header.Tensor]]:
    """The configuration and the tensors' headers, of files that are a JSON object and a whole
    safetensors file. Raises AdapterInvalid, OSError."""
    config = read_json(name, folder / CONFIG)
    try:
        return config, safetensors_header.check(folder / WEIGHTS)
    except safetensors_header.BadHeader as error:
        raise AdapterInvalid(name, str(error).replace(f"{folder}/", "")) from error


def _check_config(name: str, config: dict[str, Any], max_rank: int) -> None:
    if config.get("peft_type") != "LORA":
        raise AdapterInvalid(name, f"peft_type is {config.get('peft_type')!r}; only LORA is served")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= max_rank:
        raise AdapterInvalid(name, f"rank {rank!r} is not between 1 and {max_rank}")
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not (is_number and 0 < (alpha or 0) <= sys.float_info.max):
        raise AdapterInvalid(name, f"lora_alpha is {alpha!r}, not a positive number")
    if config.get("bias", "none") != "none":
        raise AdapterInvalid(name, "adapters that train biases are not served")
    for feature in _UNSERVED:
        if config.get(feature):
            raise AdapterInvalid(name, f"{feature} is not served")


def _check_patterns(name: str, config: dict[str, Any], modules_count: int) -> None:
    """Raises AdapterInvalid where a key is more than a part of a module's name, or where there
    are more keys than modules."""
    for field in _PATTERNS:
        patterns = config.get(field) or {}
        if not isinstance(patterns, dict) or len(patterns) > modules_count:
            raise AdapterInvalid(name, f"{field} has not one value for each of some modules")
        if key := next((key for key in patterns if not _PLAIN_KEY.fullmatch(key)), None):
            raise AdapterInvalid(name, f"{field}: {key[:200]!r} is no name of a module")


def parted(name: str, tensor: str) -> tuple[str, str]:
    """Splits `base_model.model.<module>.lora_A.weight` into module and matrix. Raises
    AdapterInvalid."""
    for matrix in ("lora_A", "lora_B"):
        ending = f".{matrix}.weight"
        if tensor.startswith(_PREFIX) and tensor.endswith(ending):
            return tensor.removeprefix(_PREFIX).removesuffix(ending), matrix
    raise AdapterInvalid(name, f"{tensor[:200]!r} is no lora_A or lora_B of a linear module")


def _mismatch(
    shapes: Mapping[str, tuple[int, ...]], base: tuple[int, int] | None, max_rank: int
) -> str:
    """Why the two matrices do not fit their module; empty when they do."""
    if base is None:
        return "its base model has no such module"
    a, b = shapes.get("lora_A", ()), shapes.get("lora_B", ())
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        return f"lora_A {list(a)} and lora_B {list(b)} are not a pair"
    if not 1 <= a[0] <= max_rank:
        return f"rank {a[0]} is not between 1 and {max_rank}"
    if (b[0], a[1]) != base:
        return f"lora_A {list(a)} and lora_B {list(b)} do not fit a weight of {list(base)}"
    return ""
