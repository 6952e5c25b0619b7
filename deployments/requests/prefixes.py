"""A stable prefix of a chat, from the request or the configuration that declares it to the engine
that warms it.

What an engine is asked to warm is a chat without its end. The engine renders it with several ends
and takes what all of them begin with, so the tokens that it warms are a prefix of each chat that
goes on from there, whatever the model's template does.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

PATH = "/v1/prewarm"  # of the front: a client opens a session
CHAT = "/v1/chat/completions"  # what it is about
ROUTE = "/prewarm"  # of an engine
# The id under which the engine's log and the events name what the configuration declares.
DECLARED = "__system_prefix__"

TERM = "kv_transfer_params"  # how long its KV stays (G4), which the front says; no part of the key

# The fields of a chat that its rendering, or the reuse of its KV, depends on.
_RENDERING = (
    "model",
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "response_format",
    "tool_choice",
)


@dataclass(frozen=True, slots=True)
class PrefixEnd:
    """Where the stable part of a chat ends."""

    whole_count: int  # messages that are stable whole
    parts_count: int = 0  # text parts of the next message that are stable too
    with_tools: bool = False  # all of its tools
    key: str = ""  # of the prefix, so that a replica knows it again without reading the chat


@dataclass(frozen=True, slots=True)
class Prefix:
    """One prefix as an engine is asked to warm it."""

    key: str  # the same for the same content, model or adapter, tenant and rendering
    body: bytes  # of POST ROUTE
    tenant: str
    name: str  # in events: DECLARED, or the key


def prefix_of(chat: dict[str, Any], cut: PrefixEnd, tenant: str, name: str = "") -> Prefix:
    """The part of a chat, as an engine gets it, in front of the cut. The role of the message behind
    it is told but is no part of the key."""
    messages = chat.get("messages") or []
    whole, rest = messages[: cut.whole_count], messages[cut.whole_count :]
    fields = {field: chat[field] for field in _RENDERING if chat.get(field) is not None}
    fields["messages"] = whole
    if cut.parts_count:
        fields["opened"] = {**rest[0], "content": rest[0]["content"][: cut.parts_count]}
    if chat.get("tools"):
        fields["tools"] = chat["tools"] if cut.with_tools else None  # None: others each time
    text = json.dumps(fields, sort_keys=True)
    key = cut.key or hashlib.sha256(text.encode()).hexdigest()[:16]
    fields["next_role"] = _role_of(rest[0]) if rest else _role_after(whole)
    if term := chat.get(TERM):
        fields[TERM] = term
    return Prefix(key, json.dumps(fields).encode(), tenant, name or key)


def served_path(path: str) -> str:
    """The path that a capability must serve to take a call for `path`."""
    return CHAT if path == PATH else path


def accepted(request_id: str, model: str, state: str) -> dict[str, str]:
    """What the client of PATH is answered. `state`: of the model, `starting` where its capability
    has no replica yet."""
    return {"object": "prewarm", "id": request_id, "model": model, "state": state}


def _role_of(message: object) -> str:
    role = message.get("role") if isinstance(message, dict) else None
    return role if isinstance(role, str) else "user"


def _role_after(messages: list[Any]) -> str:
    """Many templates insist that user and assistant take turns."""
    return "assistant" if messages and _role_of(messages[-1]) == "user" else "user"
