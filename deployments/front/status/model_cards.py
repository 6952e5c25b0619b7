"""What a model is good for, how many tokens it reads, where it is and when it could answer: facts
that the routes of OpenAI and Ollama show, each in its own words.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from arbiter.errors import ArbiterUnavailable
from deployments.config.capability_section import CapabilityConfig
from deployments.config.file_threads import in_thread
from deployments.config.load_plan import resolve
from deployments.config.model_files import context_tokens
from deployments.config.model_section import ModelConfig
from deployments.config.remotes_section import RemoteModel
from deployments.config.schema import ConfigError, Table
from deployments.front.status import arbiter_gateway
from deployments.front.status.arbiter_gateway import AWAY, Presence, soonest

T = TypeVar("T")
ReadFiles = Callable[[str, CapabilityConfig], T]  # of a model by its name

# Waited for the arbiter's state: its restart takes longer, and a list of models does without.
STATE_S = 1.0
THREADS_MOST = 16  # in which one request has files of models read
# Of a list, in which each model's files take milliseconds. A file server may hang for hours.
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
    presence_of = await presences(table, homes)
    tokens = await contexts(table, homes)
    words = {
        model: capabilities(table.capabilities[home], table.capabilities[home].models[model])
        for model, home in homes.items()
    }
    return {model: Facts(words[model], tokens[model], presence_of[model]) for model in homes}


async def presences(table: Table, models: Iterable[str]) -> dict[str, Presence]:
    """Where these models of the table are and when they could answer. Asks the arbiter alone,
    without which they are in an unknown state."""
    homes = {model: table.homes[model] for model in models}
    try:
        return (await arbiter_gateway.state(STATE_S)).presences(homes)
    except ArbiterUnavailable:
        return dict.fromkeys(homes, AWAY)


async def contexts(table: Table, models: Iterable[str]) -> dict[str, int | None]:
    """The most tokens that each reads; None where its files do not say, or not within FILES_S."""
    return await from_files(
        table, models, lambda model, capability: context(capability.models[model])
    )


async def from_files(
    table: Table, models: Iterable[str], read_files: ReadFiles[T]
) -> dict[str, T | None]:
    """What `read_files` returns for each of these models of the table, THREADS_MOST models at a
    time; None where it took longer than FILES_S for all of them. Raises what it raises."""
    places = asyncio.Semaphore(THREADS_MOST)

    async def read(model: str) -> T:
        capability = table.capabilities[table.homes[model]]
        async with places:
            return await in_thread(capability.models[model].source, read_files, model, capability)

    reads = {model: asyncio.ensure_future(read(model)) for model in models}
    try:
        if reads:
            await asyncio.wait(reads.values(), timeout=FILES_S)
        return {model: one.result() if one.done() else None for model, one in reads.items()}
    finally:
        for one in reads.values():
            one.cancel()


def remote_facts(model: RemoteModel) -> Facts:
    """What the operator's table says of a model on another machine."""
    words = tuple(BY_PATH.get(path, path.rsplit("/", 1)[1]) for path in model.paths)
    words += ("vision",) if "image" in model.inputs else ()
    return Facts(words, model.context_tokens, Presence("remote", model.first_token_s))


def capabilities(capability: CapabilityConfig, config: ModelConfig) -> tuple[str, ...]:
    """Words for what its routes do; `tools`, where it decides by itself when to call one."""
    if capability.paths:
        names = tuple(dict.fromkeys(BY_PATH.get(p, p.rsplit("/", 1)[1]) for p in capability.paths))
    else:
        names = BY_ROLE.get(capability.role, ())
        if config.engine_args.get("runner") == "pooling":
            names += POOLING
    return (*names, "tools") if config.engine_args.get("enable_auto_tool_choice") else names


def context(config: ModelConfig) -> int | None:
    """The most tokens that it reads, grown where it grows; None where its files do not say."""
    try:
        return context_tokens(Path(resolve(config.source)), config)
    except ConfigError:
        return None
