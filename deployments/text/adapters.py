"""What an engine may use of an adapter: a copy under its content's name that nobody changes.

An adapter in the catalogue belongs to whoever put it there and may change or vanish at any moment,
and vLLM's prefix cache knows adapters by path. So an engine serves `<store>/<digest>/`, copied with
bounds, hashed while copying, and checked after that: what was checked is what is loaded.
"""

import asyncio
import hashlib
import math
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments import headers
from deployments.headers import slot_bytes
from deployments.text.catalogue import CONFIG, WEIGHTS, Catalogue, Entry
from deployments.text.files import MAX_CONFIG_BYTES, AdapterInvalid, open_plain, read_json
from deployments.text.room import alone, make_room

_CHUNK_BYTES = 1 << 20
_PREFIX = "base_model.model."  # PEFT's, before the module's name in the base
_TYPES = ("F32", "F16", "BF16")
# Each of these changes what the two matrices mean, so an adapter with one would answer wrongly.
_UNSERVED = ("use_dora", "lora_bias", "modules_to_save", "layer_replication", "use_qalora",
             "use_bdlora", "alora_invocation_tokens", "trainable_token_indices",
             "megatron_config")  # fmt: skip
# The store's bound: 2,000 adapters of an 8 B model at rank 16. Beyond it the longest unused go.
MAX_STORE_BYTES = 160 << 30
FETCHED = ".fetched"  # folder in a store for what lay behind URLs; see deployments.text.remote
_HEADER_ROOM_BYTES = 4 << 20  # thousands of tensor names of 100 bytes each


@dataclass(frozen=True, slots=True)
class Rules:
    """What the base model and its engine can take. `shapes`: module to (out, in)."""

    shapes: Mapping[str, tuple[int, int]]
    max_rank: int

    @property
    def bounds(self) -> dict[str, int]:
        """File to its most bytes: an adapter that can be right has at most every module, at the
        largest rank, in float32."""
        weights_bytes = slot_bytes(self.shapes, self.max_rank, item_bytes=4) + _HEADER_ROOM_BYTES
        return {CONFIG: MAX_CONFIG_BYTES, WEIGHTS: weights_bytes}


@dataclass(frozen=True, slots=True)
class Published:
    """An adapter an engine may load."""

    digest: str
    path: Path
    size_bytes: int


class Store:
    """Content-addressed copies of one node; several engines and threads may share it."""

    def __init__(self, folder: Path, max_bytes: int = MAX_STORE_BYTES) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self._max_bytes = folder.resolve(), max_bytes

    def publish(self, entry: Entry, rules: Rules) -> Published:
        """Copy, hash, check, and only then give it its name. Blocks for the copy. Raises
        AdapterInvalid."""
        if entry.rank > rules.max_rank:
            reason = f"rank {entry.rank} is above the {rules.max_rank} its model serves"
            raise AdapterInvalid(entry.name, reason)
        scratch = Path(tempfile.mkdtemp(dir=self._folder, prefix=".copying-"))
        try:
            return self._publish(entry, rules, scratch)
        except OSError as error:
            raise AdapterInvalid(entry.name, f"{error.filename}: {error.strerror}") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _publish(self, entry: Entry, rules: Rules, scratch: Path) -> Published:
        hashed = hashlib.sha256()
        for name, bound in rules.bounds.items():
            _copy(entry, name, scratch / name, bound, hashed)
        check(entry.name, scratch, rules)
        digest = hashed.hexdigest()[:32]
        target = self._folder / digest
        size_bytes = (scratch / WEIGHTS).stat().st_size
        with alone(self._folder):
            if target.is_dir():
                os.utime(target)  # the longest unused go first
            else:
                # An engine that has one of them loaded keeps its pages, and publishes it again
                # before it loads it again.
                make_room(self._folder, size_bytes, self._max_bytes)
                scratch.rename(target)
        return Published(digest, target, size_bytes)


class Shelf:
    """The store as one engine uses it: what was published and has not changed is there at once,
    whatever else is being copied."""

    def __init__(self, store: Store, rules: Rules) -> None:
        self._store, self._rules = store, rules
        self._known: dict[tuple[str, str], tuple[Entry, Published]] = {}
        # One per adapter, so that a crowd asking for a new one has it copied once.
        self._copying: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)

    async def take(self, entry: Entry) -> Published:
        """The checked copy, made again when the entry changed or its copy is gone. Raises
        AdapterInvalid."""
        if known := self._current(entry):
            return known
        key = entry.tenant, entry.name
        async with self._copying[key]:
            if known := self._current(entry):
                return known
            made = await asyncio.to_thread(self._store.publish, entry, self._rules)
            self._known[key] = entry, made
        return made

    def _current(self, entry: Entry) -> Published | None:
        found = self._known.get((entry.tenant, entry.name))
        if found is None or found[0] != entry or not found[1].path.is_dir():
            return None
        return found[1]


def catalogue_of(config: Mapping[str, Any]) -> Catalogue:
    """What an engine and its replica see, from the engine's configuration."""
    given, base = config["adapters"], str(config.get("served_name", config["model"]))
    fetched = Path(given["store"]) / FETCHED
    urls = {base: given.get("urls", ())}
    return Catalogue({base: Path(given["folder"])}, urls=urls, fetched=fetched)


def _copy(entry: Entry, name: str, target: Path, bound: int, hashed: Any) -> None:
    """Raises AdapterInvalid for a file that is not plain or beyond the bound, OSError for links."""
    with open_plain(entry.name, entry.path / name) as reader, target.open("xb") as writer:
        target.chmod(0o400)
        left = bound
        while chunk := reader.read(_CHUNK_BYTES):
            left -= len(chunk)
            if left < 0:
                raise AdapterInvalid(entry.name, f"{name} is larger than {bound} bytes")
            hashed.update(chunk)
            writer.write(chunk)
    hashed.update(name.encode())


def check(name: str, folder: Path, rules: Rules) -> None:
    """Raises AdapterInvalid that says what is wrong with the adapter in `folder`."""
    config = read_json(name, folder / CONFIG)
    _check_config(name, config, rules.max_rank)
    try:
        tensors = headers.check(folder / WEIGHTS)
    except headers.BadHeader as error:
        raise AdapterInvalid(name, str(error).replace(f"{folder}/", "")) from error
    pairs: dict[str, dict[str, tuple[int, ...]]] = {}
    for tensor, row in tensors.items():
        module, matrix = _parted(name, tensor)
        if row.dtype not in _TYPES:
            raise AdapterInvalid(name, f"{tensor} is {row.dtype}, not one of {', '.join(_TYPES)}")
        pairs.setdefault(module, {})[matrix] = row.shape
    if not pairs:
        raise AdapterInvalid(name, f"{WEIGHTS} has no tensors")
    for module, shapes in pairs.items():
        if reason := _mismatch(shapes, rules.shapes.get(module), rules.max_rank):
            raise AdapterInvalid(name, f"{module}: {reason}")


def _check_config(name: str, config: dict[str, Any], max_rank: int) -> None:
    if config.get("peft_type") != "LORA":
        raise AdapterInvalid(name, f"peft_type is {config.get('peft_type')!r}; only LORA is served")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= max_rank:
        raise AdapterInvalid(name, f"rank {rank!r} is not between 1 and {max_rank}")
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not (is_number and 0 < float(alpha or 0) < math.inf):
        raise AdapterInvalid(name, f"lora_alpha is {alpha!r}, not a positive number")
    if config.get("bias", "none") != "none":
        raise AdapterInvalid(name, "adapters that train biases are not served")
    for feature in _UNSERVED:
        if config.get(feature):
            raise AdapterInvalid(name, f"{feature} is not served")


def _parted(name: str, tensor: str) -> tuple[str, str]:
    """`base_model.model.<module>.lora_A.weight` in its module and its matrix."""
    for matrix in ("lora_A", "lora_B"):
        ending = f".{matrix}.weight"
        if tensor.startswith(_PREFIX) and tensor.endswith(ending):
            return tensor.removeprefix(_PREFIX).removesuffix(ending), matrix
    raise AdapterInvalid(name, f"{tensor[:200]!r} is no lora_A or lora_B of a linear module")


def _mismatch(
    found: Mapping[str, tuple[int, ...]], base: tuple[int, int] | None, max_rank: int
) -> str:
    """Why the two matrices do not fit their module, or nothing."""
    if base is None:
        return "its base model has no such module"
    a, b = found.get("lora_A", ()), found.get("lora_B", ())
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        return f"lora_A {list(a)} and lora_B {list(b)} are not a pair"
    if not 1 <= a[0] <= max_rank:
        return f"rank {a[0]} is not between 1 and {max_rank}"
    if (b[0], a[1]) != base:
        return f"lora_A {list(a)} and lora_B {list(b)} do not fit a weight of {list(base)}"
    return ""
