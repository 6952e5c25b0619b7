"""What the arbiter's process does each second: looks after nodes, drops holders that died unseen,
and saves what must outlive this process."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import ray

from arbiter.core import events as ev
from arbiter.server.hours_clock import HoursClock
from arbiter.server.node_agents import LOOK_S
from arbiter.server.shell import Shell
from arbiter.server.store import Member, Store
from arbiter.units import HolderId, in_seconds

logger = logging.getLogger("arbiter")


class NodeAgents(Protocol):
    """How nodes and their agents are looked at."""

    async def look(self, feed: Callable[[ev.Event], None]) -> None: ...
    async def dead(self, members: list[Member]) -> list[HolderId]: ...


class NodeWatch:
    """Runs until it is cancelled. `sweep`: forgets what ended while no client asked.
    `usage_looks_count`: as StartConfig has it."""

    def __init__(
        self,
        shell: Shell,
        agents: NodeAgents,
        store: Store,
        sweep: Callable[[], None],
        hours: HoursClock,
        usage_looks_count: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shell, self._agents, self._store, self._sweep = shell, agents, store, sweep
        self._hours, self._usage_looks_count = hours, usage_looks_count
        self._clock, self._began_s = clock, clock()
        self._learned_saved_count = shell.core.learned_changes_count
        store.note_learned(shell.core.export_learned())
        # Written at least once: what is in the file may be of a clock that has begun anew.
        self._accounts_saved: list[list[Any]] | None = None
        self._usage_saved: dict[str, Any] | None = None

    async def run(self) -> None:
        for looks_count in itertools.count(1):
            try:
                await self._agents.look(self._shell.feed)
                await self.drop_dead_holders()
            except ray.exceptions.RayError as error:
                logger.warning("cannot see the nodes: %r; next look in %.0f s", error, LOOK_S)
            self.save_learned()
            if looks_count % self._usage_looks_count == 0:
                self.save_usage()
            self._sweep()
            self._hours.tell(self._shell.core.hours)
            self._shell.refresh_targets()
            await asyncio.sleep(LOOK_S)

    async def drop_dead_holders(self) -> None:
        """Stops waiting for holders that died while there was no arbiter. A living holder that is
        only slow keeps its engines, and its place in the state file; a driver that is silent for
        too long counts as dead though its process lives (A5)."""
        awaited = self._shell.core.awaited
        members = [m for m in self._store.members() if m.holder in awaited] if awaited else []
        if self._shell.core.gave_up_waiting:
            dead = [m.holder for m in members]  # awaited in vain: the next epoch need not
        else:
            dead = await self._agents.dead(members)
            if self._clock() - self._began_s > in_seconds(
                self._shell.core.settings.timeouts.silent
            ):
                dead += [m.holder for m in members if m.is_driver]
        for holder in dead:
            if holder in self._shell.core.awaited:  # not back meanwhile, under the same name
                self._store.drop_holder(holder)
                self._shell.feed(ev.HolderLost(holder))

    def save_all(self) -> None:
        self.save_learned()
        self.save_usage()

    def save_usage(self) -> None:
        """Accounts of clients, and how models were used; what is as it was is not written again."""
        if (accounts := self._accounts()) != self._accounts_saved:
            if self._store.save_accounts(accounts):
                self._accounts_saved = accounts
        exported = self._shell.core.export_usage()
        usage = _without_instant(exported)
        if usage != self._usage_saved and self._store.save_usage(exported):
            self._usage_saved = usage

    def _accounts(self) -> list[list[Any]]:
        return self._shell.core.export_accounts()

    def save_learned(self) -> None:
        core = self._shell.core
        count = core.learned_changes_count
        if count != self._learned_saved_count and self._store.save_learned(core.export_learned()):
            self._learned_saved_count = count


def _without_instant(usage: dict[str, Any]) -> dict[str, Any]:
    """The instant of an export differs each time."""
    return {name: value for name, value in usage.items() if name != "exported_ns"}
