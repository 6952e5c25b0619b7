"""What Ollama's clients are told of models: those there are, those loaded, one in detail."""

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from deployments.config.adapter_names import base_of
from deployments.config.capability_section import CapabilityConfig
from deployments.config.load_plan import plan
from deployments.config.remotes_section import RemoteModel
from deployments.config.schema import ConfigError, Table
from deployments.front.inference.model_names import Target
from deployments.front.status.model_cards import Facts, remote_facts

Fields = dict[str, Any]

# By role; a role that is not here is served by other routes.
ABILITIES = {"text": ["completion"], "vision": ["completion", "vision"], "embedding": ["embedding"]}

# As Ollama says it: 2^63 ns from now. Its clients print what is so far away as "Forever".
FOR_EVER = timedelta(microseconds=2**63 // 1_000)


def tags(
    table: Table,
    names: Sequence[str],
    known: Mapping[str, Facts],
    sizes: Mapping[str, int | None],
    started_unix_s: int,
) -> list[Fields]:
    """One row for each name, adapters with the size of their base. `known` has the facts of each
    model, `sizes` its `weights_bytes`."""
    return [
        {
            "name": name,
            "model": name,
            "modified_at": _time(started_unix_s),
            "size": sizes[base_of(name)] or 0,
            "digest": _digest(table, name),
            "details": _details(table.capabilities[table.homes[base_of(name)]]),
            **_facts(known[base_of(name)]),
            "capabilities": abilities(table, base_of(name)),
        }
        for name in names
    ]


def remote_tag(name: str, remote: str, model: RemoteModel, started_unix_s: int) -> Fields:
    """A model on another machine, as Ollama lists those of its cloud: no bytes are here."""
    facts = remote_facts(model)
    return {
        "name": name,
        "model": name,
        "remote_model": model.name,
        "remote_host": remote,  # as the operator calls it: its address stays here
        "modified_at": _time(started_unix_s),
        "size": 0,
        "digest": _sha256(f"{name} {remote} {model.model_dump_json()}"),
        "details": _in_detail(remote, ""),
        **_facts(facts),
        "capabilities": _remote_abilities(facts),
    }


def loaded(table: Table, state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Tickets of models that serve or sleep, by the arbiter's state."""
    return [
        ticket
        for ticket in state["tickets"]
        if ticket["state"] in ("resident", "asleep", "draining") and ticket["model"] in table.homes
    ]


def rows(
    table: Table, state: Mapping[str, Any], contexts: Mapping[str, int | None]
) -> list[Fields]:
    """One row for each ticket of `loaded`, whose models have their contexts in `contexts`.
    `size_vram` is what lies on GPUs."""
    gpus = {row["device"] for row in state["devices"] if row["kind"] == "gpu"}
    return [_row(table, ticket, contexts, gpus) for ticket in loaded(table, state)]


def _row(
    table: Table,
    ticket: Mapping[str, Any],
    contexts: Mapping[str, int | None],
    gpus: set[str],
) -> Fields:
    held = ticket["measured_bytes"] or ticket["charged_bytes"]
    model = ticket["model"]
    capability = table.capabilities[table.homes[model]]
    return {
        "name": model,
        "model": model,
        "size": sum(held.values()),
        "size_vram": sum(size for device, size in held.items() if device in gpus),
        "digest": _digest(table, model),
        "expires_at": (datetime.now(UTC) + _stays(ticket)).isoformat(),
        "context_length": contexts[model] or 0,
        "details": _details(capability),
    }


def _stays(ticket: Mapping[str, Any]) -> timedelta:
    """How long it stays while nothing asks for it, if no other model needs its bytes."""
    if ticket["leaving"]:
        return timedelta()
    if ticket["pinned"] or ticket["keep_warm_s"] < 0:
        return FOR_EVER
    idle_s = ticket["idle_s"] or 0.0
    return timedelta(seconds=ticket["stay_warm_s"] + max(0.0, ticket["keep_warm_s"] - idle_s))


def abilities(table: Table, model: str) -> list[str]:
    """What a model can do, in Ollama's words, by which its clients choose what to offer."""
    capability = table.capabilities[table.homes[model]]
    names = ABILITIES.get(capability.role, [])
    calls = capability.models[model].engine_args.get("enable_auto_tool_choice")
    return [*names, "tools"] if calls else [*names]


def _facts(facts: Facts) -> Fields:
    """Returns the facts of a model that stand beside Ollama's own fields."""
    return {name: value for name, value in facts.plain.items() if name != "capabilities"}


def card(
    table: Table, target: Target, facts: Facts, size_bytes: int | None, started_unix_s: int
) -> Fields:
    """One model or adapter; `size_bytes` of its `weights_bytes`."""
    capability = table.capabilities[target.capability]
    config = capability.models[target.model]
    lines = [f"{name} {value}" for name, value in sorted(config.defaults.items())]
    return {
        "modified_at": _time(started_unix_s),
        "parameters": "\n".join(lines),
        "template": config.chat_template or "",
        "details": _details(capability),
        "model_info": {
            "general.architecture": capability.engine,
            "general.size_bytes": size_bytes or 0,
            f"{capability.engine}.context_length": facts.context_length or 0,
        },
        **_facts(facts),
        "capabilities": abilities(table, target.model),
    }


def remote_card(remote: str, model: RemoteModel, started_unix_s: int) -> Fields:
    """A model on another machine, of which nothing but the operator's table is known."""
    facts = remote_facts(model)
    return {
        "modified_at": _time(started_unix_s),
        "parameters": "",
        "template": "",
        "details": _in_detail(remote, ""),
        "model_info": {f"{remote}.context_length": facts.context_length or 0},
        **_facts(facts),
        "capabilities": _remote_abilities(facts),
    }


def _remote_abilities(facts: Facts) -> list[str]:
    words = {"chat": "completion", "completions": "completion", "embeddings": "embedding"}
    return list(dict.fromkeys(words.get(word, word) for word in facts.capabilities))


def weights_bytes(model: str, capability: CapabilityConfig) -> int:
    """0 where the files are not on this node. Reads headers of files."""
    try:
        need = plan(model, capability).need
    except (ConfigError, OSError):
        return 0
    return int(need.weights_bytes)


def _details(capability: CapabilityConfig) -> Fields:
    return _in_detail(capability.engine, "safetensors")


def _in_detail(family: str, form: str) -> Fields:
    return {
        "parent_model": "",
        "format": form,
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": "",
    }


def _digest(table: Table, name: str) -> str:
    """Hashes where the model comes from and how it is run: Ollama's clients compare it."""
    base = base_of(name)
    config = table.capabilities[table.homes[base]].models[base]
    return _sha256(f"{name} {config.model_dump_json()}")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _time(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat()
