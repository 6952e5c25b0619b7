"""What the arbiter's process does each second: looks after nodes, drops holders that died unseen,
and saves what must outlive this process."""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

import ray

from arbiter.core import events as ev
from arbiter.server.node_agents import LOOK_S
from arbiter.server.shell import Shell
from arbiter.server.store import Member, Store
from arbiter.units import HolderId

logger = logging.getLogger("arbiter")

# A crash costs that much of the accounts and of the usage; some 100 kB are written each time.
USAGE_SAVED_LOOKS = 10


class NodeAgents(Protocol):
    """How nodes and their agents are looked at."""

    async def look(self, feed: Callable[[ev.Event], None]) -> None: ...
    async def dead(self, members: list[Member]) -> list[HolderId]: ...


class NodeWatch:
    """Runs until it is cancelled. `sweep`: forgets what ended while no client asked."""

    def __init__(
        self, shell: Shell, agents: NodeAgents, store: Store, sweep: Callable[[], None]
    ) -> None:
        self._shell, self._agents, self._store, self._sweep = shell, agents, store, sweep
        self._learned_saved = shell.core.export_learned()

    async def run(self) -> None:
        looks_count = 0
        while True:
            try:
                await self._agents.look(self._shell.feed)
                await self._drop_dead_holders()
            except ray.exceptions.RayError as error:
                logger.warning("cannot see the nodes: %r; next look in %.0f s", error, LOOK_S)
            self.save_learned()
            looks_count += 1
            if looks_count % USAGE_SAVED_LOOKS == 0:
                self.save_usage()
            self._sweep()
            self._shell.refresh_targets()
            await asyncio.sleep(LOOK_S)

    async def _drop_dead_holders(self) -> None:
        """Stops waiting for holders that died while there was no arbiter. A living holder that is
        only slow keeps its engines, and its place in the state file."""
        awaited = self._shell.core.awaited
        members = [m for m in self._store.members() if m.holder in awaited] if awaited else []
        if self._shell.core.gave_up_waiting:
            dead = [m.holder for m in members]  # awaited in vain: the next epoch need not
        else:
            dead = await self._agents.dead(members)
        for holder in dead:
            if holder in self._shell.core.awaited:  # not back meanwhile, under the same name
                self._store.drop_holder(holder)
                self._shell.feed(ev.HolderLost(holder))

    def save_all(self) -> None:
        self.save_learned()
        self.save_usage()

    def save_usage(self) -> None:
        """Accounts of clients, and how models were used."""
        self._store.save_accounts(self._shell.core.export_accounts())
        self._store.save_usage(self._shell.core.export_usage())

    def save_learned(self) -> None:
        learned = self._shell.core.export_learned()
        if learned != self._learned_saved:
            self._store.save_learned(learned)
            self._learned_saved = learned
