"""Lines that Ray shows among its events: on the first page of its dashboard, and by `ray list
cluster-events`. Its agent on each node reads them from a folder of the session.
"""

import logging
import os
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from pathlib import Path

PART_BYTES = 8 << 20  # of 300 bytes a line: the dashboard keeps the newest 10,000


def event_writer(folder: Path, name: str) -> Callable[[str, str], None]:
    """Returns what writes one event: what it is about, and its sentence. `folder`: of the session's
    logs. `name`: of the file, among those of the session. Raises OSError. A line that cannot be
    written later is lost."""
    from ray._private.event.event_logger import EventLoggerAdapter
    from ray.core.generated.event_pb2 import Event

    events = folder / "events"
    events.mkdir(exist_ok=True)
    handler = _Parts(events / f"event_COMMON_{name}.log")
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.Logger(name)
    logger.addHandler(handler)
    adapter = EventLoggerAdapter(Event.SourceType.COMMON, logger)
    return lambda about, message: adapter.info(message, about=about)


class _Parts(RotatingFileHandler):
    """Writes a file in parts, of which all but the newest two are emptied. They are not removed,
    because Ray remembers by inode how far it has read a file: the next file may get that of a
    removed one, and Ray would pass over its lines."""

    def __init__(self, first: Path) -> None:
        self._first, self._number = first, 1
        super().__init__(first, maxBytes=PART_BYTES)

    def doRollover(self) -> None:  # noqa: N802  # as logging calls it
        """Goes on in the next part."""
        self.close()
        if self._number > 1:
            os.truncate(self._part(self._number - 1), 0)
        self._number += 1
        self.baseFilename = str(self._part(self._number))
        self.stream = self._open()

    def _part(self, number: int) -> Path:
        return self._first if number == 1 else self._first.with_stem(f"{self._first.stem}-{number}")
