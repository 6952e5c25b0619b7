"""Which tokens every chat begins with that goes on from a stable prefix (G1).

A template may write anything behind the prefix: the end of a message, the tools, a generation
prompt. So the chat is rendered with several endings, and what all the renderings begin with is the
prefix. A tokenizer may join the last characters of the prefix with the first ones behind it, so the
endings begin with characters of several kinds, and the last tokens are left out: a tokenizer that
cuts at no word border joins yet others.
"""

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

Chat = dict[str, Any]

# Letters, white space, digits, punctuation, and beyond ASCII
ENDINGS = ("a", " b", "\nc", "1", "<d", "é", "...")

# Tokens at the end of what all endings share that another ending may change. Only whole blocks of
# tokens are cached, so these seldom cost one.
LOOSE_COUNT = 4


def endings(prefix: Chat, role: str) -> Iterator[Chat]:
    """Chats that begin with the prefix and differ from there on, also in their tools where those
    are not part of it."""
    shared = {k: v for k, v in prefix.items() if k not in ("messages", "opened", "next_role")}
    for number, ending in enumerate(ENDINGS):
        if (opened := prefix.get("opened")) is not None:
            last = {**opened, "content": [*opened["content"], {"type": "text", "text": ending}]}
        else:
            last = {"role": role, "content": ending}
        chat = shared | {"messages": [*prefix["messages"], last]}
        if "tools" in prefix and prefix["tools"] is None:
            name = f"{'abcdefg'[number]}{number}"
            chat["tools"] = [{"type": "function", "function": {"name": name, "parameters": {}}}]
        yield chat


def common(rows: list[list[int]]) -> list[int]:
    """What all rows begin with, but for its loose end."""
    first, last = min(rows), max(rows)  # in the order of lists: what these share, all do
    shared = [
        a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    ]
    return shared[: max(0, len(shared) - LOOSE_COUNT)]
