"""The part of a request that its sender marks as repeated: the extension field `stable: true` of a
message, of a text part of a message's content, or of each tool.

The stable run is what stands in front of the first segment without a mark: the messages that are
marked whole, then the marked text parts of the next one; and the tools, where all of them are
marked. Templates put tools before or behind a system prompt, so the tools are a part of the run
whether or not the messages are. A request without marks that begins with what its model's
configuration declares has that for its run.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from deployments.config.model_section import ModelConfig
from deployments.front.inference.model_names import Target
from deployments.requests import prefixes
from deployments.requests.prefixes import PrefixEnd

STABLE = "stable"
# Where each API keeps what a conversation repeats, in the order in which it is rendered.
LISTS = ("tools", "system", "messages", "input")
TEXTS = ("text", "input_text", "output_text")  # the types of the parts that may be marked


class BadMark(ValueError):
    """A mark that is neither true nor false. `place`: as `messages[0].content[1].stable`."""

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.place = place

    def __str__(self) -> str:
        return f"`{self.place}`: write true or false"


@dataclass(frozen=True, slots=True)
class StableRun:
    """How much of a request is stable, from its beginning."""

    whole_count: int  # items of the last list of LISTS in it that are stable whole
    parts_count: int  # text parts of the next item that are stable too
    with_tools: bool  # all tools
    canonical: bytes  # the stable content itself, the same for equal content however it is spelt


def stable_run(body: dict[str, Any]) -> StableRun | None:
    """The stable run of a body whose marks are there still; None where nothing is stable. Changes
    nothing. The model, the tenant and the adapter are no part of `canonical`."""
    given_tools = body.get("tools")
    tools = given_tools if isinstance(given_tools, list) else []
    with_tools = bool(tools) and all(map(_is_marked, tools))
    prefix: dict[str, Any] = {"tools": [_plain(tool) for tool in tools]} if with_tools else {}
    whole = parts = 0
    for name in LISTS[1:]:
        items = body.get(name)
        if name == "system" and isinstance(items, str) and items:
            break  # Anthropic's short form has no place for a mark
        if not isinstance(items, list) or not items:
            continue
        whole, prefix[name] = _leading(items)
        parts, opened = _leading_parts(items[whole]) if whole < len(items) else (0, {})
        if parts:
            prefix[name].append(opened)
        if whole < len(items):
            break
    fields = {name: value for name, value in prefix.items() if value}
    if not fields:
        return None
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return StableRun(whole, parts, with_tools, text.encode())


def take(body: dict[str, Any]) -> StableRun | None:
    """The stable run of a body whose marks it takes out; None where there were no marks. Marks that
    make no run, because an unmarked segment stands before them, give an empty run. Raises
    BadMark."""
    if not any(STABLE in item for _, item in _segments(body)):
        return None
    run = stable_run(body) or StableRun(0, 0, False, b"")
    strip(body)
    return run


def cut_of(
    path: str,
    fields: dict[str, Any] | None,
    run: StableRun | None,
    model: ModelConfig,
    target: Target,
    tenant: str,
) -> PrefixEnd | None:
    """Where the stable part of a chat ends that goes to an engine as `fields`. `run`: as its sender
    marked it. All of a pre-warm without marks is stable."""
    if fields is None or prefixes.served_path(path) != prefixes.CHAT:
        return None
    if run is None and path == prefixes.PATH:
        run = stable_run(_all_marked(fields))
    if run is not None:
        cut = PrefixEnd(run.whole_count, run.parts_count, run.with_tools) if run.canonical else None
    else:
        cut = _declared(fields, model, target, tenant)
    return replace(cut, key=prefixes.prefix_of(fields, cut, tenant).key) if cut else None


def _declared(
    fields: dict[str, Any], model: ModelConfig, target: Target, tenant: str
) -> PrefixEnd | None:
    """The longest of the configured prefixes that the chat begins with."""
    tools, messages = fields.get("tools") or [], fields.get("messages") or []
    adapter = target.served.removeprefix(target.model).removeprefix(":") or None
    counts = [
        len(entry.chat)
        for entry in model.stable_prefixes
        if (entry.adapter, entry.tenant, entry.tools) == (adapter, tenant, tools)
        and messages[: len(entry.chat)] == entry.chat
    ]
    return PrefixEnd(max(counts), with_tools=bool(tools)) if counts else None


def _all_marked(fields: dict[str, Any]) -> dict[str, Any]:
    lists = {name: fields.get(name) or [] for name in ("tools", "messages")}
    return {name: [{**item, STABLE: True} for item in items] for name, items in lists.items()}


def strip(body: dict[str, Any]) -> bool:
    """Takes all marks out of a body, because no engine knows them; returns whether there was one.
    Raises BadMark."""
    found = False
    for place, item in _segments(body):
        if STABLE in item:
            if not isinstance(item[STABLE], bool):
                raise BadMark(f"{place}.{STABLE}")
            del item[STABLE]
            found = True
    return found


def _segments(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Everything that may carry a mark, with its place."""
    for name in LISTS:
        for place, item in _objects(body.get(name), name):
            yield place, item
            if name != "tools":
                yield from _objects(item.get("content"), f"{place}.content")


def _objects(items: object, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(items, list):
        for number, item in enumerate(items):
            if isinstance(item, dict):
                yield f"{place}[{number}]", item


def _is_marked(item: object) -> bool:
    return isinstance(item, dict) and item.get(STABLE) is True


def _leading(messages: list[Any]) -> tuple[int, list[Any]]:
    """How many messages are stable whole, and these without marks."""
    kept: list[Any] = []
    for message in messages:
        if not _is_whole(message):
            break
        kept.append(_plain(message))
    return len(kept), kept


def _is_whole(message: object) -> bool:
    """Marked itself, or in each of its parts. A picture or a sound is no stable text."""
    if not isinstance(message, dict):
        return False
    content = message.get("content")
    if not isinstance(content, list):
        return _is_marked(message)
    marked = _is_marked(message) or (bool(content) and all(map(_is_marked, content)))
    return marked and all(map(_is_text, content))


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in TEXTS


def _leading_parts(message: object) -> tuple[int, dict[str, Any]]:
    """How many of a message's first parts are stable, and the message with these alone."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(content, list):
        return 0, {}
    count = 0
    for part in content:
        if not (_is_text(part) and (_is_marked(part) or _is_marked(message))):
            break
        count += 1
    return count, _plain({**message, "content": content[:count]})


def _plain(item: dict[str, Any]) -> dict[str, Any]:
    """Returns the item without marks."""
    bare = {name: value for name, value in item.items() if name != STABLE}
    if isinstance(content := bare.get("content"), list):
        bare["content"] = [_plain(p) if isinstance(p, dict) else p for p in content]
    return bare
