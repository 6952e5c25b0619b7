"""From one configured model to what a replica needs to load it: entry, engine config, need.

Estimates here are what can be known before any load (A17): an explicit need, else the sum of
the tensors in the safetensors headers, else a guess from sizes or the name, plus the engine's own
overhead. What was measured in earlier loads is the arbiter's to add.
"""

import asyncio
import hashlib
import importlib.util
import json
import logging
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arbiter.core.records import estimates
from arbiter.core.types import DeviceBytes, Need, Split
from arbiter.errors import ArbiterUnavailable, LoadFailed, UnknownCapability, UnknownModel
from arbiter.protocol.messages import Plain
from arbiter.units import MIB, Bytes, Span, seconds
from deployments.config import safetensors_header
from deployments.config.fields import parse_size
from deployments.config.schema import (
    CapabilityConfig,
    ConfigError,
    DrafterConfig,
    ModelConfig,
    Table,
    parse_table,
)


@dataclass(frozen=True, slots=True)
class EngineKind:
    """What is known of an engine library without importing it."""

    entry: str  # `module:function`, called in the engine's process
    preload: tuple[str, ...]  # modules the zygote imports so that a start is short
    context_bytes: Bytes  # what a live but empty engine process holds, measured on the CPU build
    working_bytes: Bytes  # activations and buffers under traffic, KV cache apart
    takes_turns: bool = False  # computes under a dispatch lock where the model names one
    program: str = ""  # has to be on the PATH
    split: Split = Split.NONE  # over several devices, where one is too small (B5)
    drafts: bool = False  # loads a drafter beside its model


# What a drafter's process part holds beyond its weights: seen with vLLM's CPU build, 33 MiB in all
# for one of 7 MiB.
DRAFTER_WORKING_BYTES = Bytes(26 * MIB)

# One line per engine library; a new one is this line and its file. The bytes are what the node
# agent measured of the embedded models on the CPU build (docs/benchmarks.md).
ENGINES: dict[str, EngineKind] = {
    "vllm": EngineKind(
        "deployments.engines.vllm.engine:build",
        ("deployments.engines.vllm.preload",),
        context_bytes=Bytes(100 * MIB),
        working_bytes=Bytes(96 * MIB),
        split=Split.EQUAL,  # tensor parallel
        drafts=True,
    ),
    "sentence_transformers": EngineKind(
        "deployments.engines.sentence_transformers:build",
        ("deployments.engines.sentence_transformers",),
        context_bytes=Bytes(56 * MIB),
        working_bytes=Bytes(32 * MIB),
        takes_turns=True,
        split=Split.PROPORTIONAL,  # transformers' device_map
    ),
    "llama_server": EngineKind(
        "deployments.engines.llama_server:build",
        ("aiohttp",),
        context_bytes=Bytes(64 * MIB),  # not measured, like those of any engine outside this table
        working_bytes=Bytes(64 * MIB),
        program="llama-server",
    ),
}


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Everything a replica needs to load one model."""

    model: str
    entry: str
    config: dict[str, Any]  # handed to `entry` in the child, as JSON
    need: Need
    need_is_explicit: bool
    settings_key: str  # same model and engine settings, same key: learned peaks belong to it
    split: Split = Split.NONE
    grown: "ModelPlan | None" = None  # the same model with more (A14); None: it does not grow
    stays_grown: Span = Span(0)  # of a grown one: with no request for so long it gives back


def plan(name: str, capability: CapabilityConfig) -> ModelPlan:
    """Raises ConfigError when the model's files are not there or the engine is unknown."""
    model = capability.models[name]
    made = _plan(name, model, capability)
    if not model.grow_to:
        return made
    more = {"engine_args": model.engine_args | model.grow_to, "grow_to": {}}
    grown = _plan(name, model.model_copy(update=more), capability)
    config = made.config | {"grows_to": grown.config["engine_args"]}
    if made.need_is_explicit:
        kv_bytes = _kv_bytes(model.grow_to) - _kv_bytes(model.engine_args)
        working = Bytes(made.need.working_bytes + kv_bytes)
        grown = replace(grown, need=replace(made.need, working_bytes=working))
    if grown.need.device_bytes <= made.need.device_bytes:
        raise ConfigError(f"{name}: `grow_to` asks for no more memory than it has")
    stays = seconds(model.stays_grown_s)
    return replace(made, config=config, grown=replace(grown, stays_grown=stays))


def _plan(name: str, model: ModelConfig, capability: CapabilityConfig) -> ModelPlan:
    kind = engine_kind(capability.engine)
    path = resolve(model.source)
    config = {
        "model": path,
        "served_name": name,
        "can_sleep": model.can_sleep and model.drafter is None,
        "engine_args": {k: plain(k, v) for k, v in model.arguments.items()},
    }
    if model.threads is not None:
        config["threads"] = model.threads
    if model.dispatch is not None:
        if not kind.takes_turns:
            raise ConfigError(f"{name}: engine {capability.engine!r} has no `dispatch` lock")
        config["dispatch_lock"] = model.dispatch.lock
    if model.adapters is not None:
        config["adapters"] = adapters(path, model)
    need = model.need.as_need() if model.need else estimate(path, model, kind)
    if model.drafter is not None:
        config["drafter"], drafter_bytes = _drafter(name, model.drafter, capability)
        need = replace(need, host_bytes=Bytes(0), drafter_bytes=drafter_bytes)
    return ModelPlan(
        name,
        kind.entry,
        config,
        need,
        model.need is not None,
        _key(capability.engine, config),
        kind.split,
    )


def _key(engine: str, config: dict[str, Any]) -> str:
    """Hashes the engine's name as the table has it, not where its code lies: learned peaks outlive
    a move of the engine's module."""
    text = json.dumps([engine, config], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _drafter(
    name: str, drafter: DrafterConfig, capability: CapabilityConfig
) -> tuple[dict[str, Any], Bytes]:
    """What the engine is told of the drafter, and the bytes that it adds to the target's ticket:
    its weights and workspace. Its part of the KV cache is in the target's, which vLLM divides among
    the layers of both. Raises ConfigError."""
    if not engine_kind(capability.engine).drafts:
        raise ConfigError(f"{name}: engine {capability.engine!r} loads no `drafter`")
    path = resolve(capability.models[drafter.model].source)
    size = Bytes(weights_bytes(Path(path)) + DRAFTER_WORKING_BYTES)
    return {"model": path, "tokens": drafter.tokens}, size


def parts(devices: tuple[DeviceBytes, ...]) -> dict[str, Any]:
    """What an engine is told of a ticket over several GPUs: bytes on each, in the order in which it
    sees them (arbiter.node.zygotes.equipped)."""
    gpus = [
        (int(d.device.rsplit("gpu:", 1)[1]), d.size_bytes) for d in devices if "gpu:" in d.device
    ]
    return {"parts": [size for _, size in sorted(gpus)]} if len(gpus) > 1 else {}


def engine_kind(engine: str) -> EngineKind:
    if kind := ENGINES.get(engine):
        if kind.program and shutil.which(kind.program) is None:
            raise ConfigError(f"engine {engine!r} needs {kind.program!r} on the PATH")
        return kind
    if ":" in engine:
        return EngineKind(engine, (), Bytes(64 * MIB), Bytes(64 * MIB))
    known = ", ".join(sorted(ENGINES))
    raise ConfigError(f"no engine {engine!r}; there is: {known}, or write `module:function`")


def plain(key: str, value: Any) -> Any:
    """Sizes may be written with units wherever an engine argument counts bytes."""
    return parse_size(value) if key.endswith("_bytes") else value


# vLLM's default number of sequences in a batch; more slots than sequences serve nobody.
DEFAULT_SEQUENCES = 128


def adapters(path: str, model: ModelConfig) -> dict[str, Any]:
    """What the engine is told: the folder, and as many slots as their share of bytes pays for.
    Raises ConfigError."""
    given = model.adapters
    assert given is not None
    one = slot_size(path, given.max_rank)
    most = model.engine_args.get("max_num_seqs", DEFAULT_SEQUENCES)
    paid = int(weights_bytes(Path(path)) * given.slot_share) // one
    return {
        "folder": str(Path(given.folder).expanduser()),
        "store": str(adapter_store()),
        "max_rank": given.max_rank,
        "slots": given.slots or max(1, min(most, paid)),
        "wait_s": given.wait_s,
        "urls": list(given.urls),
    }


def slot_size(path: str, max_rank: int) -> int:
    """Bytes of one adapter slot. Raises ConfigError."""
    try:
        return safetensors_header.slot_bytes(safetensors_header.linear_shapes(Path(path)), max_rank)
    except (safetensors_header.BadHeader, OSError) as error:
        raise ConfigError(str(error)) from error


def adapter_store() -> Path:
    """Where engines keep the adapters they have checked."""
    default = Path.home() / ".cache" / "serve-arbiter" / "adapters"
    return Path(os.environ.get("ARBITER_ADAPTERS", default))


def models_folder() -> Path:
    """Where models/make_models.py puts what it makes."""
    default = Path.home() / ".cache" / "serve-arbiter" / "models"
    return Path(os.environ.get("ARBITER_MODELS", default))


def resolve(source: str) -> str:
    """A folder for `made:NAME` and `package:NAME`; a path or hub id as it is."""
    kind, _, name = source.partition(":")
    if kind == "made":
        folder = models_folder() / name
        if not folder.is_dir():
            raise ConfigError(f"{source}: no folder {folder}; make it with `make models`")
        return str(folder)
    if kind == "package":
        return _package_folder(source, name)
    return source


def _package_folder(source: str, name: str) -> str:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"{source}: package {name!r} is not installed; pip install it")
    root = Path(next(iter(spec.submodule_search_locations)))
    inside = sorted(root.glob("**/config.json"), key=lambda p: len(p.parts))
    if not inside:
        raise ConfigError(f"{source}: no config.json inside package {name!r}")
    return str(inside[0].parent)


def estimate(path: str, model: ModelConfig, kind: EngineKind) -> Need:
    """Header sum plus the engine's overhead."""
    weights = weights_bytes(Path(path))
    kv_bytes = _kv_bytes(model.engine_args)
    working = Bytes(kind.working_bytes + kv_bytes + _adapter_bytes(path, model))
    return Need(
        weights_bytes=weights,
        working_bytes=working,
        context_bytes=kind.context_bytes,
        host_bytes=weights if model.can_sleep else Bytes(0),
        least_bytes=Bytes(weights + kv_bytes) if kv_bytes else Bytes(0),
    )


def _kv_bytes(arguments: dict[str, Any]) -> int:
    return parse_size(arguments.get("kv_cache_memory_bytes", 0))


def _adapter_bytes(path: str, model: ModelConfig) -> int:
    """Slots, and as many adapters again in vLLM's own cache on the host, which without a GPU is
    the same RAM; with one it is slack."""
    if model.adapters is None:
        return 0
    slots = int(adapters(path, model)["slots"])
    return 2 * slots * slot_size(path, model.adapters.max_rank)


def weights_bytes(source: Path) -> Bytes:
    """Sum of all tensors in the folder's safetensors headers; where there are none a guess. Raises
    ConfigError when there is nothing to guess from, or a header is broken."""
    files = sorted(source.glob("*.safetensors"))
    try:
        if files:
            return Bytes(
                sum(t.size_bytes for file in files for t in safetensors_header.read(file).values())
            )
    except safetensors_header.BadHeader as error:
        raise ConfigError(str(error)) from error
    guess = estimates.of_files(_file_sizes(source)) or estimates.of_name(str(source))
    if guess is None:
        raise ConfigError(f"{source}: no .safetensors here; give the model a `need`")
    return guess


def _file_sizes(source: Path) -> dict[str, int]:
    """Of a model in one file, or in folders of a folder; empty for a hub id."""
    if source.is_file():
        return {source.name: source.stat().st_size}
    found = (path for path in source.rglob("*") if path.is_file())
    return {str(path.relative_to(source)): path.stat().st_size for path in found}


# -------------------------------------------------------------------------------------------------
# What a holder knows of its capability's models: the table as the arbiter last handed it over.


logger = logging.getLogger("arbiter.residency")


class Plans:
    """Plans of one capability's models, made when first needed."""

    def __init__(self, capability: str) -> None:
        self._capability = capability
        self._table: Table | None = None
        self._made: dict[str, ModelPlan] = {}

    @property
    def known(self) -> bool:
        return self._table is not None

    def take(self, raw: Plain) -> tuple[str, ...]:
        """Follow a new table from the next load on. Returns the models it pins."""
        try:
            self._table = parse_table(raw, "the arbiter's table")
        except ConfigError as error:
            logger.error("%s", error)
            return ()
        self._made.clear()
        mine = self._table.capabilities.get(self._capability)
        return tuple(m for m, config in mine.models.items() if config.pin) if mine else ()

    def forget(self, model: str) -> None:
        """Its files have changed: what was read of them no longer holds."""
        self._made.pop(model, None)

    async def of(self, model: str) -> ModelPlan:
        """Reads file headers, so in a thread. Raises UnknownModel and other RequestErrors."""
        while model not in self._made:  # again when the table changed meanwhile
            table, config = self._table, self._config()
            if model not in config.models:
                raise UnknownModel(model, self._capability, tuple(sorted(config.models)))
            try:
                made = await asyncio.to_thread(plan, model, config)
            except (ConfigError, OSError) as error:
                raise LoadFailed(model, str(error), False) from error
            if self._table is table:
                self._made[model] = made
        return self._made[model]

    def _config(self) -> CapabilityConfig:
        if self._table is None:
            raise ArbiterUnavailable(0.0)
        if self._capability not in self._table.capabilities:
            raise UnknownCapability(self._capability, tuple(sorted(self._table.capabilities)))
        return self._table.capabilities[self._capability]
