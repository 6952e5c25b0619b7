"""What a model is good for, how many tokens it reads, where it is and when it could answer: facts
that the routes of OpenAI and Ollama show, each in its own words.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arbiter.errors import ArbiterUnavailable
from deployments.config.file_threads import in_thread
from deployments.config.load_plan import resolve
from deployments.config.model_files import context_tokens
from deployments.config.remotes_section import RemoteModel
from deployments.config.schema import CapabilityConfig, ConfigError, ModelConfig, Table
from deployments.front import arbiter_gateway
from deployments.front.arbiter_gateway import AWAY, Presence, soonest

# Waited for the arbiter's state: its restart takes longer, and a list of models does without.
STATE_S = 1.0
THREADS_MOST = 16  # in which one request has headers of models read
# Of all headers of a list, each of which takes milliseconds. A file server may hang for hours.
FILES_S = 5.0

# By role, where the table lists no paths: what every class of the role serves.
BY_ROLE: dict[str, tuple[str, ...]] = {
    "text": ("chat", "completions", "responses", "messages"),
    "vision": ("chat", "messages", "vision"),
    "embedding": ("embeddings",),
    "asr": ("transcriptions",),
    "tts": ("speech",),
    "vad": ("vad",),
    "image": ("images", "image_edits", "image_variations"),
}
POOLING = ("rerank", "score")  # beside vectors, by vLLM's pooling runner
BY_PATH = {
    "/v1/chat/completions": "chat",
    "/v1/images/generations": "images",
    "/v1/images/edits": "image_edits",
    "/v1/images/variations": "image_variations",
}


@dataclass(frozen=True, slots=True)
class Facts:
    """What clients are told of one model."""

    capabilities: tuple[str, ...]
    context_length: int | None  # tokens; None: not known, or it reads none
    presence: Presence

    @property
    def plain(self) -> dict[str, Any]:
        """The fields of a card."""
        return {
            "capabilities": list(self.capabilities),
            "context_length": self.context_length,
            "state": self.presence.state,
            "estimate_s": self.presence.estimate_s,
        }


def together(rungs: Sequence[Facts]) -> Facts:
    """The facts of several models of which any may answer; at least one."""
    words = tuple(dict.fromkeys(word for one in rungs for word in one.capabilities))
    contexts = [one.context_length for one in rungs if one.context_length is not None]
    best = min((one.presence for one in rungs), key=soonest)
    return Facts(words, max(contexts, default=None), best)


async def facts(table: Table, models: Iterable[str]) -> dict[str, Facts]:
    """Facts of these models of the table. Reads headers of files, and asks the arbiter, without
    which models are in an unknown state. What is not read within FILES_S is not known."""
    homes = {model: table.homes[model] for model in models}
    try:
        there = (await arbiter_gateway.state(STATE_S)).presences(homes)
    except ArbiterUnavailable:
        there = dict.fromkeys(homes, AWAY)
    rows = [(model, table.capabilities[home]) for model, home in homes.items()]
    configs = [capability.models[model] for model, capability in rows]
    turns = asyncio.Semaphore(THREADS_MOST)

    async def tokens_of(config: ModelConfig) -> int | None:
        async with turns:
            return await in_thread(config.source, context, config)

    reads = [asyncio.ensure_future(tokens_of(config)) for config in configs]
    try:
        if reads:
            await asyncio.wait(reads, timeout=FILES_S)
        read = [one.result() if one.done() else None for one in reads]
    finally:
        for one in reads:
            one.cancel()
    return {
        model: Facts(capabilities(capability, config), tokens, there[model])
        for (model, capability), config, tokens in zip(rows, configs, read, strict=True)
    }


def remote_facts(model: RemoteModel) -> Facts:
    """What the operator's table says of a model on another machine."""
    words = tuple(BY_PATH.get(path, path.rsplit("/", 1)[1]) for path in model.paths)
    words += ("vision",) if "image" in model.inputs else ()
    return Facts(words, model.context_tokens, Presence("remote", model.first_token_s))


def capabilities(capability: CapabilityConfig, config: ModelConfig) -> tuple[str, ...]:
    """Words for what its routes do; `tools`, where it decides by itself when to call one."""
    if capability.paths:
        found = tuple(dict.fromkeys(BY_PATH.get(p, p.rsplit("/", 1)[1]) for p in capability.paths))
    else:
        found = BY_ROLE.get(capability.role, ())
        if config.engine_args.get("runner") == "pooling":
            found += POOLING
    return (*found, "tools") if config.engine_args.get("enable_auto_tool_choice") else found


def context(config: ModelConfig) -> int | None:
    """The most tokens that it reads, grown where it grows; None where its files do not say."""
    try:
        return context_tokens(Path(resolve(config.source)), config)
    except ConfigError:
        return None
