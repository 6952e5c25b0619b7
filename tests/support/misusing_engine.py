"""An engine that uses the rows of its slab out of turn, and says what each misuse raised."""

import os
from collections.abc import Callable

from arbiter.errors import RowMisused
from arbiter.pool import Rows, Slab
from arbiter.units import Content
from deployments.engines.asgi import respond
from deployments.engines.protocol import Config, Receive, Scope, Send
from tests.support.odd_engines import RandomEngine
from tests.support.slabs import NAMESPACE, ROW, TERM_S, Clock, store

KEPT, FREED, HELD = b"kept", b"freed", b"held"


class MisusingEngine(RandomEngine):
    """Each request misuses rows, with none of it caught but for its report."""

    async def load(self) -> None:
        slab = Slab(self.where, Content.KV, NAMESPACE, ROW)
        self.rows = Rows(slab, TERM_S, Clock())
        store(self.rows, KEPT, FREED, HELD)
        self.rows.pin([HELD])
        self.rows.drop(FREED)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.where: str = config["slabs"][Content.KV]["path"]

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        rows = self.rows
        misuses: dict[str, Callable[[], object]] = {
            "free twice": lambda: rows.drop(FREED),
            "use what is freed": lambda: rows.pin([FREED]),
            "unpin below zero": lambda: rows.unpin([KEPT]),
            "free what is pinned": lambda: rows.drop(HELD),
            "mark what is freed": lambda: rows.mark_ready(FREED),
            "pull an extent away": lambda: os.truncate(self.where, ROW),
        }
        await respond(send, 200, {name: _raised_by(act) for name, act in misuses.items()})


def _raised_by(act: Callable[[], object]) -> list[str]:
    try:
        act()
    except (RowMisused, PermissionError) as error:
        return [type(error).__name__, str(error)]
    return []


def build(config: Config) -> MisusingEngine:
    return MisusingEngine(config)
