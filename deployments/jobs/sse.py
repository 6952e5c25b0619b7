"""Server-sent events out of the pieces of a stream."""

import json
import re
from typing import Any

_END = re.compile(rb"\r?\n\r?\n")
_END_MOST = 4  # bytes of it
DONE = "[DONE]"  # the data of OpenAI's last event
# str.splitlines would also end a line at U+2028, U+2029 and U+0085, which JSON has within texts.
_LINE_END = re.compile(r"\r\n|\r|\n")


class Events:
    """Each whole event as text without its empty line; comments are dropped."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, piece: bytes) -> list[str]:
        """The events that this piece ends. What came before is not searched again: an event with a
        picture comes in hundreds of pieces."""
        start = max(0, len(self._rest) - _END_MOST + 1)  # an end may have begun there
        self._rest += piece
        whole, begin = [], 0
        for end in list(_END.finditer(self._rest, start)):
            whole.append(bytes(self._rest[begin : end.start()]))
            begin = end.end()
        if begin:
            del self._rest[:begin]
        return [one.decode(errors="replace") for one in whole if one and not one.startswith(b":")]

    @property
    def rest(self) -> str:
        """What came behind the last whole event."""
        return self._rest.decode(errors="replace")


def data_of(event: str) -> dict[str, Any]:
    """The JSON of an event; empty where it has none."""
    try:
        document = json.loads(_text_of(event))
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def is_whole(event: str) -> bool:
    """Says whether the data of an event is JSON, or DONE. Also True of an event without data."""
    text = _text_of(event).strip()
    if text in ("", DONE):
        return True
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _text_of(event: str) -> str:
    return "\n".join(line[5:] for line in _LINE_END.split(event) if line.startswith("data:"))
