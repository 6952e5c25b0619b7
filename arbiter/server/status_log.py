"""Status messages where Ray shows them: among the events of its dashboard (K5).

What a holder or device has is written after it has changed, once the changes that belong together
are over; nothing is written at rest.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

from arbiter.core.arbiter import Arbiter
from arbiter.core.decisions import EventKind
from arbiter.core.reports.status_messages import status_messages
from arbiter.protocol import ray_internals
from arbiter.protocol.dashboard_events import event_writer
from arbiter.server.event_log import REQUESTS
from arbiter.units import Epoch, Instant

logger = logging.getLogger("arbiter")

# A swap is some lines of the event log within half a second, and Ray's dashboard looks each two.
SETTLE_S = 1.0

Messages = Callable[[], Mapping[str, str]]  # what each is about, and its sentence as of now
Write = Callable[[str, str], None]  # what a message is about, and the message


class StatusLog:
    """Keeps the last message of each holder and device, and when to look for others."""

    def __init__(self, messages: Messages, write: Write, settle_s: float = SETTLE_S) -> None:
        self._messages, self._write, self._settle_s = messages, write, settle_s
        self._reported: Mapping[str, str] = {}
        self._due: asyncio.TimerHandle | None = None

    def note(self, kind: EventKind) -> None:
        """Looks at the messages soon after a line of the event log, unless it is a request's,
        which changes no bytes."""
        if kind not in REQUESTS and self._due is None:
            self._due = asyncio.get_running_loop().call_later(self._settle_s, self._tell)

    def _tell(self) -> None:
        self._due = None
        now = self._messages()
        for about, message in now.items():
            if self._reported.get(about) != message:
                self._write(about, message)
        for about in self._reported.keys() - now.keys():
            self._write(about, f"{about} has left.")
        self._reported = now


def opened(core: Arbiter, epoch: Epoch, clock: Callable[[], Instant]) -> StatusLog | None:
    """Returns the status log of this arbiter; None outside a cluster. A folder that cannot be
    written costs the messages, not the arbiter."""
    session = ray_internals.session_folder()
    if session is None:
        return None
    try:
        write = event_writer(session / "logs", f"arbiter-{epoch}")
    except OSError as error:
        logger.warning("Ray's dashboard gets no status messages: %s", error)
        return None
    return StatusLog(lambda: status_messages(core.snapshot(clock())), write)
