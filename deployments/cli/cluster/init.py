"""`arbiter init`: writes a configuration for this machine.

What it has comes from the entries of the shipped configurations, of serve_config.gpu.yaml or, for a
large card, serve_config.gpu80.yaml where there are GPUs, of serve_config.yaml where there are none,
and from the models that a person names.
"""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from arbiter.units import GIB, MIB, Bytes, human
from deployments.cli.cluster import config_text
from deployments.cli.output import AsJson, CommandError, show, table, working

if TYPE_CHECKING:
    from deployments.cli.cluster.model_sources import Source

LARGE_GPU = 78 * GIB  # what NVML reports of the cards that are sold with 80 GB
PIPELINE = ("vad", "asr", "chat", "tts")
LENT = 0.9  # of a device; the rest is kept back (`arena`)
HOST_PART, HOST_MOST, HOST_LEAST = 0.25, 64 * GIB, 1 * GIB  # of RAM, for weights asleep
CPU_PART = 0.5  # of RAM, for models on a machine without a GPU
NAMED = re.compile(r"(?:([a-z]+):)?([^=:]+)=(.+)")
UNKNOWN_PART = 0.3  # of a device, granted to a model whose size nothing tells


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is of it to divide."""

    gpus: tuple[Bytes, ...]
    ram_bytes: Bytes
    words: str

    @property
    def largest_bytes(self) -> int:
        return max(self.gpus, default=int(self.ram_bytes * CPU_PART))

    @property
    def host_bytes(self) -> int:
        part = int(self.ram_bytes * HOST_PART)
        return max(HOST_LEAST, min(HOST_MOST, part if self.gpus else part // 2))


def find_machine(wants_gpu: bool | None) -> Machine:
    """Reads NVML and the kernel. `wants_gpu`: None leaves it to what there is. Raises
    CommandError."""
    from arbiter.node import nvml, procfs

    ram, _ = procfs.ram()
    try:
        gpus = nvml.find_gpus() if wants_gpu is not False else nvml.NoGpus()
        cards = [gpus.card(index) for index in range(gpus.count())]
    except (nvml.NvmlFailed, nvml.GpuUnreadable) as error:
        raise CommandError(f"{error}; `--cpu` does without") from error
    if wants_gpu and not cards:
        raise CommandError("NVML finds no GPU here; without --gpu the file is for the CPU")
    words = f"{human(ram)} of RAM"
    if cards:
        words = ", ".join(f"{card.name} of {human(card.total_bytes)}" for card in cards)
    return Machine(tuple(card.total_bytes for card in cards), ram, words)


def init(
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("serve_config.yaml"),
    gpu: Annotated[
        bool | None, typer.Option("--gpu/--cpu", help="Default: --gpu if NVML finds a GPU.")
    ] = None,
    capabilities: Annotated[
        str, typer.Option(help="Capabilities to serve, as chat,embedding. Default: all.")
    ] = "",
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="[CAPABILITY:]NAME=SOURCE, a folder or hub id; it takes the place of the"
            " capability's own models."
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65_535, help="The port of the API.")] = 8000,
    force: Annotated[bool, typer.Option(help="Replace the file where it exists.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a configuration for this machine: its GPUs or RAM, capabilities and models."""
    if file.exists() and not force:
        raise CommandError(f"{file} exists; name another file, or replace it by --force")
    with working("looking at this machine and its models"):
        machine = find_machine(gpu)
        config = written(machine, _names(capabilities), model or [], port)
    try:
        file.write_text(config.text)
    except OSError as error:
        raise CommandError(f"{file} cannot be written: {error}") from error
    rows = [(name, human(Bytes(need))) for name, need in config.need_bytes.items()]
    heads = ("model", "about, while resident")
    lines = [f"left out: {line}" for line in config.left_out]
    if len(config.need_bytes) < len(_models(config.text)):
        lines.append("`make models` makes those that are not made yet")
    next_is = f"`arbiter check {file}` names what an edit breaks; `arbiter serve {file}` starts it"
    wrote = f"{file}: for {machine.words}"
    value = {"file": str(file), "need_bytes": config.need_bytes, "left_out": config.left_out}
    show(as_json, value, wrote, table(heads, rows, numbers=heads[1:]), *lines, next_is)


def _models(text: str) -> list[str]:
    table = yaml.safe_load(text)["applications"][0]["deployments"][0]["user_config"]
    return [name for row in table["capabilities"].values() for name in row["models"]]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


@dataclass(frozen=True, slots=True)
class WrittenConfig:
    """A configuration for a machine."""

    text: str  # of the file
    need_bytes: dict[str, int]  # of each model
    left_out: list[str]  # models, with the reason


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model as `--model` names it."""

    name: str
    source: str
    capability: str  # may be empty


def written(
    machine: Machine, chosen: list[str], models: list[str], port: int = 8000
) -> WrittenConfig:
    """Makes the text of a configuration for this machine. Raises CommandError."""
    from deployments.cli.cluster.model_sources import look

    entries = config_text.shipped(_shipped_name(machine))
    if unknown := [name for name in chosen if name not in entries]:
        raise CommandError(f"--capabilities: no {unknown[0]!r}; there is: {', '.join(entries)}")
    selected = [_named(one, entries) for one in models]
    named = [look(one.name, one.source, one.capability) for one in selected]
    _refuse_twice(named)
    wanted = chosen or list(entries)
    for source in named:
        if source.capability not in wanted:
            raise CommandError(
                f"{source.name}: {source.source} is for {source.capability}"
                f" ({source.what.split(';')[0]}), which --capabilities leaves out"
            )
    capabilities = {name: entries[name] for name in entries if name in wanted}
    for capability in {source.capability for source in named}:
        capabilities[capability].models.clear()
    for source in named:
        comment = source.what.format(size=human(source.weights_bytes or Bytes(0)))
        entry = capabilities[source.capability]
        entry.add(source.name, comment, _row(source, machine, entry.engine))
    return _fitted(machine, capabilities, {source.name for source in named}, port)


def _named(text: str, entries: dict[str, Any]) -> NamedModel:
    """Raises CommandError."""
    match = NAMED.fullmatch(text)
    if match is None:
        raise CommandError(f"--model {text!r}: write NAME=SOURCE, or CAPABILITY:NAME=SOURCE")
    if match[1] and match[1] not in entries:
        raise CommandError(f"--model {text!r}: no capability {match[1]!r} of {', '.join(entries)}")
    return NamedModel(match[2], match[3], match[1] or "")


def _refuse_twice(named: "list[Source]") -> None:
    names = [source.name for source in named]
    if twice := [name for name in names if names.count(name) > 1]:
        raise CommandError(f"--model {twice[0]}: this name is given twice")


def _fitted(
    machine: Machine,
    capabilities: dict[str, config_text.CapabilityText],
    asked_for: set[str],
    port: int,
) -> WrittenConfig:
    """Writes the configuration without the models of the shipped file that are larger than this
    machine."""
    needs, left_out = _needs(machine, capabilities), []
    for entry in capabilities.values():
        for name in [name for name in entry.models if needs.get(name, 0) > _room(machine)]:
            why = f"{name} needs {human(Bytes(needs[name]))}, of {human(Bytes(_room(machine)))}"
            if name in asked_for:
                raise CommandError(f"{why} that a device lends here")
            left_out.append(why)
            del entry.models[name], needs[name]
    capabilities = {name: entry for name, entry in capabilities.items() if entry.models}
    if not capabilities:
        raise CommandError(f"nothing fits on {machine.words}: {'; '.join(left_out)}")
    text = config_text.whole(
        _about(machine, needs, left_out),
        port,
        _arbiter(machine, capabilities, needs),
        list(capabilities.values()),
    )
    return WrittenConfig(text, needs, left_out)


def _shipped_name(machine: Machine) -> str:
    """The shipped configuration for the largest of its devices."""
    if not machine.gpus:
        return "serve_config.yaml"
    is_large = max(machine.gpus) >= LARGE_GPU
    return "serve_config.gpu80.yaml" if is_large else "serve_config.gpu.yaml"


def _room(machine: Machine) -> int:
    """What one model may take: of all GPUs together, because vLLM divides a model over several."""
    from arbiter.core.settings import Settings
    from arbiter.core.tickets.budget import budget_of
    from arbiter.core.types import DeviceKind

    lent = (budget_of(Bytes(size), DeviceKind.GPU, Settings()) for size in machine.gpus)
    return sum(lent) or int(LENT * machine.largest_bytes)


def _needs(machine: Machine, capabilities: dict[str, config_text.CapabilityText]) -> dict[str, int]:
    """Bytes of each model while resident. Models that `make models` has yet to make are not in it.
    Raises CommandError."""
    from deployments.config.load_plan import plan
    from deployments.config.schema import ConfigError, parse_table

    raw = yaml.safe_load("".join(entry.text for entry in capabilities.values()))
    needs: dict[str, int] = {}
    for capability in parse_table({"capabilities": raw}).capabilities.values():
        for name, model in capability.models.items():
            try:
                needs[name] = plan(name, capability).need.device_bytes
            except ConfigError as error:
                if not model.source.startswith("made:"):
                    raise CommandError(f"{name}: {error}") from error
    return needs


def _about(machine: Machine, needs: dict[str, int], left_out: list[str]) -> list[str]:
    about = ", ".join(f"{name} {human(Bytes(need))}" for name, need in needs.items())
    return [
        f"Written by `arbiter init` for {machine.words}.",
        "`arbiter check` names what an edit breaks, `arbiter serve` starts it.",
        *textwrap.wrap(f"While resident, about: {about}.", 96),
        *(f"Left out: {line}." for line in left_out),
    ]


def _arbiter(
    machine: Machine, capabilities: dict[str, config_text.CapabilityText], needs: dict[str, int]
) -> dict[str, str]:
    """Lines of the arbiter's section."""
    host = f"host: {machine.host_bytes // MIB} MiB"
    if machine.gpus:
        arenas = f"{{{host}}} # sleeping weights; a GPU's arena is nine tenths of it"
    else:
        # Enough for all of them where that is less than half of the RAM.
        most = max(sum(needs.values()) / LENT, GIB)
        cpu_bytes = int(min(most, machine.largest_bytes))
        arenas = f"{{cpu: {cpu_bytes // MIB} MiB, {host}}} # of RAM: models, and sleeping weights"
    lines = {"evict": "learned", "arenas": arenas}
    if set(PIPELINE) <= capabilities.keys():
        lines["pipelines"] = f"[[{', '.join(PIPELINE)}]] # a voice turn loads the next stage ahead"
    return lines


def _row(source: "Source", machine: Machine, engine: str) -> dict[str, Any]:
    """The keys of a model that a person named."""
    arguments = _arguments(source, machine)
    row: dict[str, Any] = {"source": source.source}
    need = _need(source, machine, engine, arguments)
    if need:
        row["need"] = need
    if source.capability in ("asr", "tts", "vad"):
        row["can_sleep"] = False
    return row | ({"engine_args": arguments} if arguments else {})


def _arguments(source: "Source", machine: Machine) -> dict[str, Any]:
    """Returns the arguments of vLLM and diffusers; other engines need none."""
    has_gpu = bool(machine.gpus)
    if source.capability == "image":
        return {"steps": 30, "max_batch": 1}
    if source.capability not in ("chat", "rerank", "vision"):
        return {}
    most = 16_384 if has_gpu else 2_048
    length = min(source.context_tokens or most, most)
    arguments: dict[str, Any] = {"max_model_len": length, "max_num_seqs": 64 if has_gpu else 16}
    cache = 3 * GIB if has_gpu else 512 * MIB
    if source.capability == "rerank":
        arguments |= {"runner": "pooling"} | ({} if has_gpu else {"dtype": "float32"})
        cache = 64 * MIB
    if source.capability == "vision":
        arguments |= {"limit_mm_per_prompt": {"image": 2}, "mm_processor_cache_gb": 0.25}
        cache //= 3
    left = int(_room(machine) - (source.weights_bytes or 0) * 1.1 - 1.5 * GIB * has_gpu)
    cache = max(64 * MIB, min(cache, left))
    return arguments | {"kv_cache_memory_bytes": f"{cache // MIB} MiB"}


def _need(
    source: "Source", machine: Machine, engine: str, arguments: dict[str, Any]
) -> dict[str, str]:
    """Empty where the files of a folder tell it to the arbiter (A17)."""
    from deployments.config.engine_kinds import GPU_CONTEXT, engine_kind
    from deployments.config.fields import parse_size

    is_here = Path(source.source).expanduser().exists() or ":" in source.source
    if is_here and not machine.gpus and source.capability != "image":
        return {}
    weights = source.weights_bytes or int(machine.largest_bytes * UNKNOWN_PART)
    cache = parse_size(arguments.get("kv_cache_memory_bytes", 0))
    if machine.gpus:
        overhead, context = 1 * GIB, GPU_CONTEXT
    else:
        kind = engine_kind(engine)
        overhead, context = kind.working_bytes, kind.context_bytes
    parts = {"weights": weights, "working": cache + overhead, "context": context}
    if source.capability == "image":
        parts["scratch"] = 3 * GIB if machine.gpus else 1 * GIB
    return {name: f"{-(-size // MIB)} MiB" for name, size in parts.items() if size}
