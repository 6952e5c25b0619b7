"""Whether a model can do what a request needs: its path, its length, its pictures, its tools. Pure,
but for the import of a capability's class, which says its paths.
"""

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from deployments import messages
from deployments.app import CLASSES, class_path
from deployments.config.capability_section import CapabilityConfig
from deployments.config.schema import ConfigError
from deployments.requests import prefixes

# Characters of a token of text, as English has it for most tokenizers. A length told by this is an
# estimate: a request near the bound may reach an engine that refuses it.
TOKEN_CHARS = 4
_TEXT = ("messages", "prompt", "input", "system", "instructions")
_MOST = ("max_completion_tokens", "max_output_tokens", "max_tokens")
_PICTURES = frozenset({"image_url", "input_image", "image"})


@dataclass(frozen=True, slots=True)
class Needs:
    """What a request needs of its model."""

    path: str
    tokens_count: int = 0  # read and written, as estimated; 0: it is no generation of text
    has_pictures: bool = False
    has_tools: bool = False  # of which the model chooses


def needs_of(path: str, fields: Mapping[str, Any] | None, *, generates: bool) -> Needs:
    """`fields`: of a JSON body; None: of a form, which says nothing here. `generates`: text."""
    if fields is None or not generates:
        return Needs(prefixes.served_path(path))
    texts = [fields[name] for name in _TEXT if name in fields]
    answer_tokens = next((n for name in _MOST if isinstance(n := fields.get(name), int)), 0)
    tokens_count = -(-_chars(texts) // TOKEN_CHARS) + answer_tokens
    return Needs(
        prefixes.served_path(path),
        tokens_count,
        has_pictures=_has_pictures(fields.get("messages") or fields.get("input")),
        has_tools=bool(fields.get("tools")) and _chooses(fields.get("tool_choice")),
    )


def _chooses(tool_choice: object) -> bool:
    """Whether the model chooses if it calls a tool: `auto` as chats, Anthropic's messages, and
    OpenAI's choice among allowed tools write it, the last within an object in a chat."""
    if not isinstance(tool_choice, dict):
        return tool_choice in (None, "auto")
    allowed = tool_choice.get("allowed_tools", tool_choice)
    mode = allowed.get("mode") if isinstance(allowed, dict) else None
    return tool_choice.get("type") == "auto" or mode == "auto"


def unfit(needs: Needs, name: str, capability: CapabilityConfig, context: int | None) -> str | None:
    """Why a model of this capability cannot do it, for a person; None: it can. `context`: tokens
    that it reads; None: not known."""
    paths = served_paths(capability)
    if needs.path != messages.ACQUIRE and paths and needs.path not in paths:
        return f"{name} does not serve {needs.path}"
    if context is not None and needs.tokens_count > context:
        return (
            f"the request has about {needs.tokens_count} tokens with its answer, "
            f"and {name} takes {context}"
        )
    if needs.has_pictures and capability.role != "vision":
        return f"{name} reads no pictures"
    calls = capability.models[name].engine_args.get("enable_auto_tool_choice")
    if needs.has_tools and not calls:
        return f"{name} does not choose tools"
    return None


def served_paths(capability: CapabilityConfig) -> frozenset[str]:
    """The paths as the table lists them, else as the class of the capability does; empty: a class
    of another package says, which only its replica imports."""
    if capability.paths:
        return frozenset(capability.paths)
    try:
        place = class_path(capability)
    except ConfigError:
        return frozenset()
    return _paths_of(place) if place in CLASSES.values() else frozenset()


@cache
def _paths_of(place: str) -> frozenset[str]:
    module, _, name = place.partition(":")
    paths: frozenset[str] = getattr(importlib.import_module(module), name).paths
    return paths


def _chars(value: object) -> int:
    """Counts the characters of all text within, without pictures and sound; a token by number
    counts as TOKEN_CHARS."""
    count = 0
    for one in _nested(value, ("content", "text")):
        match one:
            case str():
                count += len(one)
            case int():
                count += TOKEN_CHARS
    return count


def _has_pictures(value: object) -> bool:
    return any(
        isinstance(one, dict) and str(one.get("type")) in _PICTURES
        for one in _nested(value, ("content",))
    )


def _nested(value: object, fields: tuple[str, ...]) -> Iterator[object]:
    """All values within, of objects those of these fields; the stack is our own, because a client
    chooses how deep it nests."""
    waiting = [value]
    while waiting:
        yield (one := waiting.pop())
        match one:
            case list():
                waiting += one
            case dict():
                waiting += [one[name] for name in fields if name in one]
