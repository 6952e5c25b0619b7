"""Server-sent events out of the pieces of a stream."""

import json
import re
from typing import Any

_END = re.compile(rb"\r?\n\r?\n")


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
    text = "\n".join(line[5:] for line in event.splitlines() if line.startswith("data:"))
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
