"""Server-sent events out of the pieces of a stream."""

import json
import re
from typing import Any

_END = re.compile(rb"\r?\n\r?\n")
_END_MOST = 4  # bytes of it
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


def data_of(event: str) -> dict[str, Any]:
    """The JSON of an event; empty where it has none."""
    text = "\n".join(line[5:] for line in _LINE_END.split(event) if line.startswith("data:"))
    try:
        document = json.loads(text)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
