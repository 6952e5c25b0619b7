"""From one configured model to what a replica needs to load it: entry, engine config, need.

The need is what can be known before any load (A17): explicit, else the estimate of the engine's
kind. What was measured in earlier loads is the arbiter's to add.
"""

import asyncio
import hashlib
import importlib.util
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from arbiter.core.types import DeviceBytes, ModelName, Need, Split
from arbiter.errors import ArbiterUnavailable, LoadFailed, UnknownCapability, UnknownModel
from arbiter.protocol.messages import CopyRequest, Plain
from arbiter.units import DEFAULT_TENANT, MIB, Bytes, Content, Span, seconds
from deployments.config.capability_section import MERGED, CapabilityConfig
from deployments.config.engine_kinds import engine_kind
from deployments.config.environment import Environment
from deployments.config.fields import USUAL, parse_size
from deployments.config.file_threads import in_thread
from deployments.config.model_files import adapter_slots, slot_size, weights_bytes
from deployments.config.model_section import DrafterConfig, ModelConfig
from deployments.config.schema import ConfigError, Table, parse_table
from deployments.messages import KV_TERM
from deployments.requests import prefixes
from deployments.requests.prefixes import DECLARED, Prefix, PrefixEnd, prefix_of

# What a drafter takes in its target's process beyond its own weights. With vLLM's CPU build a
# drafter of 7 MiB took 33 MiB in all.
DRAFTER_WORKING_BYTES = Bytes(26 * MIB)

# What a sleeping model may hold beside a shared copy of its files: its buffers, which are in no
# file. Those of the embedded models take 2 to 60 KiB.
OWN_BYTES = Bytes(MIB)

# The files by which the folder of a model is found within a package: the description of a model, or
# of a voice.
PACKAGED = ("config.json", "*.onnx.json")


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
    without_drafter: "ModelPlan | None" = None  # the same model without its drafter (F9)
    stays_grown: Span = Span(0)  # in `grown`: after so long without a request it is shrunk again
    copy: CopyRequest | None = None  # the copy of its files in host RAM that it shares (D4)
    slab_contents: tuple[Content, ...] = ()  # the contents for which it gets slabs of the pool (E1)
    takes_prewarms: bool = False  # its engine may have a prefix cache to warm
    prefixes: tuple[Prefix, ...] = ()  # declared in the configuration (G1)
    rewarm: Span = Span(0)  # between two re-warm sweeps of `prefixes` (G5)


def plan(name: str, capability: CapabilityConfig) -> ModelPlan:
    """Raises ConfigError when the model's files are not there or the engine is unknown."""
    model = capability.models[name]
    load_plan = _plan(name, model, capability)
    if model.host_copy != "private":
        load_plan = _shared(load_plan, model, capability)
    if model.drafter:
        only: dict[str, Any] = {"drafter": None, "can_sleep": False, "grow_to": {}}
        without = _plan(name, model.model_copy(update=only), capability)
        load_plan = replace(load_plan, without_drafter=without)
    if not model.grow_to:
        return load_plan
    more = {"engine_args": model.engine_args | model.grow_to, "grow_to": {}}
    grown = _plan(name, model.model_copy(update=more), capability)
    config = load_plan.config | {"grows_to": grown.config["engine_args"]}
    if load_plan.need_is_explicit:
        cache_bytes = engine_kind(capability.engine).cache_bytes
        more_bytes = cache_bytes(model.grow_to) - cache_bytes(model.engine_args)
        working = Bytes(load_plan.need.working_bytes + more_bytes)
        grown = replace(grown, need=replace(load_plan.need, working_bytes=working))
    if grown.need.device_bytes <= load_plan.need.device_bytes:
        raise ConfigError(f"{name}: `grow_to` asks for no more memory than it has")
    stays = seconds(model.stays_grown_s)
    return replace(load_plan, config=config, grown=replace(grown, stays_grown=stays))


def merged(name: str, capability: CapabilityConfig, served: str, adapter: Path) -> ModelPlan:
    """The plan of a copy of a model with an adapter in its weights (F7). `served`: the name that
    requests for the adapter have; `adapter`: the folder of its checked copy. Its engine writes no
    slab, because blocks of it would be those of another model with every adapter. Raises
    ConfigError."""
    only: dict[str, Any] = {
        "adapters": None,
        "stable_prefixes": [],
        "can_sleep": False,  # what sleeps is the checkpoint, without the adapter
    }
    model = capability.models[name].model_copy(update=only)
    # One name, and so one key, for all adapters: their peaks are alike.
    load_plan = _plan(name + MERGED, model, capability)
    config = load_plan.config | {"served_name": served, "merged": str(adapter)}
    return replace(
        load_plan,
        config=config,
        need=replace(load_plan.need, host_bytes=Bytes(0)),
        slab_contents=(),
    )


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
        if model.adapters.merge and not kind.merges_adapters:
            raise ConfigError(f"{name}: engine {capability.engine!r} cannot `merge` an adapter")
    need = model.need.as_need() if model.need else kind.estimate(kind, path, model)
    # A model that cannot sleep needs no host RAM for a sleep, although an explicit need without
    # `host` counts as much as the weights.
    if not config["can_sleep"]:
        need = replace(need, host_bytes=Bytes(0))
    if model.drafter is not None:
        config["drafter"], drafter_bytes = _drafter(name, model.drafter, capability)
        need = replace(need, drafter_bytes=drafter_bytes)
    return ModelPlan(
        name,
        kind.entry,
        config,
        need,
        model.need is not None,
        _key(capability.engine, config),
        kind.split,
        slab_contents=kind.slab_contents(path, model),
        takes_prewarms=kind.takes_prewarms,
        prefixes=tuple(_declared(name, model)) if kind.takes_prewarms else (),
        rewarm=seconds(model.rewarm_s),
    )


def _shared(load_plan: ModelPlan, model: ModelConfig, capability: CapabilityConfig) -> ModelPlan:
    """The plan of a model whose engines share a host copy of its files, for which they have no host
    RAM of their own (D4). The replica adds the capability to the copy's owner. Raises
    ConfigError."""
    kind, path = engine_kind(capability.engine), load_plan.config["model"]
    if not kind.copies:
        raise ConfigError(
            f"{load_plan.model}: engine {capability.engine!r} keeps host copies private"
        )
    if not Path(path).exists():
        raise ConfigError(f"{load_plan.model}: `host_copy` of {path!r}, which is no folder here")
    own = Bytes(OWN_BYTES + _adapter_bytes(path, model))
    config = load_plan.config | {"host_copy": {"own_bytes": own}}
    for_group = model.host_copy == "group"
    return replace(
        load_plan,
        config=config,
        settings_key=_key(capability.engine, config),
        need=replace(load_plan.need, host_bytes=own if load_plan.need.host_bytes else Bytes(0)),
        copy=CopyRequest(
            ModelName("", load_plan.model), str(Path(path).absolute()), kind.copies, for_group
        ),
    )


def _adapter_bytes(path: str, model: ModelConfig) -> int:
    """Slots of adapters, which lie in none of the model's files."""
    if model.adapters is None:
        return 0
    return adapter_slots(path, model) * slot_size(path, model.adapters.max_rank)


def _declared(name: str, model: ModelConfig) -> Iterator[Prefix]:
    """The stable prefixes of the configuration, as a request that begins with them reaches the
    engine."""
    for entry in model.stable_prefixes:
        fields: dict[str, Any] = {"messages": entry.chat}
        if entry.tools:
            fields["tools"] = entry.tools
        if entry.tenant != DEFAULT_TENANT:
            fields["cache_salt"] = entry.tenant
        if model.keep_kv and model.kv_term != USUAL:
            fields[prefixes.TERM] = {KV_TERM: model.kv_term}
        fields["model"] = f"{name}:{entry.adapter}" if entry.adapter else name
        chat = model.with_thinking(model.defaults | fields)
        cut = PrefixEnd(len(entry.chat), with_tools=bool(chat.get("tools")))
        yield prefix_of(chat, cut, entry.tenant, DECLARED)


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
    if not engine_kind(capability.engine).takes_drafters:
        raise ConfigError(f"{name}: engine {capability.engine!r} loads no `drafter`")
    path = resolve(capability.models[drafter.model].source)
    size = Bytes(weights_bytes(Path(path)) + DRAFTER_WORKING_BYTES)
    return {"model": path, "tokens": drafter.tokens}, size


def parts(devices: tuple[DeviceBytes, ...]) -> dict[str, Any]:
    """What an engine is told of a ticket over several GPUs: bytes on each, in the order in which it
    sees them (arbiter.node.zygote_client.equipped)."""
    gpus = [
        (int(d.device.rsplit("gpu:", 1)[1]), d.size_bytes) for d in devices if "gpu:" in d.device
    ]
    return {"parts": [size for _, size in sorted(gpus)]} if len(gpus) > 1 else {}


def plain(key: str, value: Any) -> Any:
    """Sizes may be written with units wherever an engine argument counts bytes."""
    return parse_size(value) if key.endswith("_bytes") else value


def adapters(path: str, model: ModelConfig) -> dict[str, Any]:
    """What the engine is told: the folder, and as many slots as their share of bytes pays for.
    Raises ConfigError."""
    section = model.adapters
    assert section is not None
    return {
        "folder": str(Path(section.folder).expanduser()),
        "store": str(adapter_store()),
        "max_rank": section.max_rank,
        "slots": adapter_slots(path, model),
        "wait_s": section.wait_s,
        "urls": list(section.urls),
        "rebalance_s": section.rebalance_s,
    } | ({"merge": section.merge.model_dump()} if section.merge else {})


def adapter_store() -> Path:
    """Where engines keep adapters that they have checked."""
    return Environment().adapters


def models_folder() -> Path:
    """Where models/make_models.py puts what it makes."""
    return Environment().models


def resolve(source: str) -> str:
    """A folder for `made:NAME` and `package:NAME`; a path or hub id as it is."""
    kind, _, name = source.partition(":")
    if kind == "made":
        folder = models_folder() / name
        if not folder.is_dir():
            raise ConfigError(
                f"{source}: no folder {folder}; make it with `make models`, or with `python -m"
                " models.make_models --random` where its weights are random"
            )
        return str(folder)
    if kind == "package":
        return _package_folder(source, name)
    return source


def _package_folder(source: str, name: str) -> str:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # of a package within an absent one; of no name
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"{source}: package {name!r} is not installed; pip install it")
    root = Path(next(iter(spec.submodule_search_locations)))
    for pattern in PACKAGED:
        if inside := sorted(root.glob(f"**/{pattern}"), key=lambda p: len(p.parts)):
            break
    else:
        raise ConfigError(f"{source}: no {' or '.join(PACKAGED)} inside package {name!r}")
    return str(inside[0].parent)


# -------------------------------------------------------------------------------------------------
# A holder's knowledge of its capability's models: the table that the arbiter sent last.


logger = logging.getLogger("arbiter.residency")


class Plans:
    """Plans of one capability's models, each made at its first use."""

    def __init__(self, capability: str) -> None:
        self._capability = capability
        self._table: Table | None = None
        self._plans: dict[str, asyncio.Future[ModelPlan]] = {}  # made, or being made

    @property
    def known(self) -> bool:
        return self._table is not None

    def take(self, raw: Plain) -> tuple[str, ...]:
        """Follows a new table from the next load on. Returns the models that it pins."""
        try:
            self._table = parse_table(raw, "the arbiter's table")
        except ConfigError as error:
            logger.error("%s", error)
            return ()
        self._plans.clear()
        mine = self._table.capabilities.get(self._capability)
        return tuple(m for m, config in mine.models.items() if config.pin) if mine else ()

    @property
    def slab_caps(self) -> tuple[tuple[str, float], ...]:
        """Tenants that may not fill a slab, and the part of its rows that each may have (E6)."""
        tenants = self._table.arbiter.tenants if self._table else {}
        return tuple((name, own.slab) for name, own in sorted(tenants.items()) if own.slab < 1)

    def forget(self, model: str) -> None:
        """Makes the model's plan anew, because its files have changed."""
        self._plans.pop(model, None)

    async def of(self, model: str) -> ModelPlan:
        """The plan of one model, made once for all who ask; reads file headers, so in a thread.
        Raises UnknownModel, UnknownCapability, LoadFailed, ArbiterUnavailable."""
        while True:  # again when table or files changed meanwhile
            config = self._config()
            if model not in config.models:
                raise UnknownModel(model, self._capability, tuple(sorted(config.models)))
            making = self._plans.get(model)
            if making is None:
                making = in_thread(config.models[model].source, plan, model, config)
                self._plans[model] = making
                making.add_done_callback(partial(self._forget_failed, model))
            try:
                made = await asyncio.shield(making)
            except (ConfigError, OSError) as error:
                raise LoadFailed(model, str(error), False) from error
            if self._plans.get(model) is making:
                return made

    def _forget_failed(self, model: str, making: asyncio.Future[ModelPlan]) -> None:
        is_failed = making.cancelled() or making.exception() is not None
        if is_failed and self._plans.get(model) is making:
            del self._plans[model]

    async def merged(self, model: str, served: str, adapter: Path) -> ModelPlan:
        """The plan of a copy with an adapter in its weights. Raises UnknownCapability, LoadFailed,
        ArbiterUnavailable."""
        config = self._config()
        try:
            source = config.models[model].source
            return await in_thread(source, merged, model, config, served, adapter)
        except (ConfigError, OSError, KeyError) as error:
            raise LoadFailed(model, str(error), False) from error

    def _config(self) -> CapabilityConfig:
        if self._table is None:
            raise ArbiterUnavailable(0.0)
        if self._capability not in self._table.capabilities:
            raise UnknownCapability(self._capability, tuple(sorted(self._table.capabilities)))
        return self._table.capabilities[self._capability]
