"""Server-sent events out of the pieces of a stream."""

import json
import re
from typing import Any

_END = re.compile(rb"\r?\n\r?\n")
# str.splitlines would also end a line at U+2028, U+2029 and U+0085, which JSON has within texts.
_LINE_END = re.compile(r"\r\n|\r|\n")


class Events:
    """Each whole event as text without its empty line; comments are dropped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[str]:
        """The events that this piece ends."""
        *whole, self._rest = _END.split(self._rest + piece)
        return [one.decode(errors="replace") for one in whole if one and not one.startswith(b":")]


def data_of(event: str) -> dict[str, Any]:
    """The JSON of an event; empty where it has none."""
    text = "\n".join(line[5:] for line in _LINE_END.split(event) if line.startswith("data:"))
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
