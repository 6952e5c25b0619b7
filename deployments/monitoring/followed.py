"""What a viewer of `GET /arbiter/view/stream` has, from one message to the next (K4)."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from deployments.monitoring.story import EventRow
from deployments.monitoring.view import COLD, View, from_plain

KEPT_EVENTS = 500  # more than a person scrolls back through


class FollowedStream:
    """Takes the messages of one stream after the other."""

    def __init__(self) -> None:
        self.events: deque[EventRow] = deque(maxlen=KEPT_EVENTS)  # newest last
        self.away_unix_s: float | None = None  # since when no arbiter answers
        self._sections: dict[str, Any] = {}
        self._models: dict[tuple[str, str], dict[str, Any]] = {}

    @property
    def last_event(self) -> int:
        """Returns the number behind which the next stream is to begin."""
        return self.events[-1].seq if self.events else 0

    def begin_anew(self) -> None:
        """Called before another stream. Drops all but the events, because a stream begins with the
        whole view and with whether an arbiter answers, and is asked only for newer events."""
        self._sections, self._models = {}, {}
        self.away_unix_s = None

    def take(self, message: Mapping[str, Any]) -> View | None:
        """Returns the view as of this message; None: it has not come yet. Raises ValueError for
        what a front of another version sends."""
        self.away_unix_s = message.get("away_unix_s", self.away_unix_s)
        try:
            self.events += msgspec.convert(message.get("events", []), list[EventRow])
        except msgspec.ValidationError as error:
            raise ValueError(f"the front's events are of another version: {error}") from error
        self._sections |= message.get("view", {})
        for row in message.get("models", []):
            self._models[row["capability"], row["model"]] = row
        for name in message.get("gone", []):
            capability, _, model = name.partition("/")
            self._models.pop((capability, model), None)
        if not self._sections:
            return None
        rows = sorted(
            self._models.values(),
            key=lambda row: (row["state"] == COLD, row["model"], row["capability"]),
        )
        return from_plain(self._sections | {"models": rows})
