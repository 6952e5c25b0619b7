"""What the arbiter's process does each second: looks after nodes, drops holders that died unseen,
and saves what must outlive this process."""

import asyncio
import hashlib
import itertools
import json
import logging
import time
from collections.abc import Callable, Collection
from typing import Any, Protocol

import ray

from arbiter.core import events as ev
from arbiter.core.types import ModelName
from arbiter.server.hours_clock import HoursClock
from arbiter.server.node_agents import LOOK_S
from arbiter.server.shell import Shell
from arbiter.server.store import ExpectedHolder, Store
from arbiter.units import HolderId, NodeId, in_seconds

logger = logging.getLogger("arbiter")

USAGE_PART_COUNT = 64  # models whose uses are looked at in one second: 2 to 3 ms


class NodeAgents(Protocol):
    """Names how nodes and their agents are looked at."""

    async def look(self, feed: Callable[[ev.Event], None], known: Collection[NodeId]) -> None: ...
    async def dead(self, members: list[ExpectedHolder]) -> list[HolderId]: ...


class NodeWatch:
    """Looks after nodes and saves what was learned. `watch_nodes` and `keep` run until they are
    cancelled. `sweep`: keeps leases that no process
    holds, and forgets what ended while no client asked. `usage_looks_count`: as StartConfig has
    it."""

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
        self._learned_saved_count = 0  # what was forgotten as rows were taken back leaves the file
        self._removed_saved = shell.core.export_removed_models()
        self._removing_saved = shell.core.export_removing()
        self._asked_saved = shell.core.export_asked()
        # Written at least once: what is in the file may be of a clock that has begun anew.
        self._accounts_saved: list[list[Any]] | None = None
        self._usage_saved: dict[int, bytes] = {}  # digests of the parts that are in the file
        self._usage_parts: list[list[ModelName]] = []  # that are looked at next
        self._usage_part = 0  # the first of them

    async def watch_nodes(self) -> None:
        """Looks at the nodes, once a second. Ray and the agents may take long to answer, so nothing
        else is done here."""
        while True:
            try:
                await self._agents.look(self._shell.feed, self._shell.core.nodes)
                await self.drop_dead_holders()
            except ray.exceptions.RayError as error:
                logger.warning("cannot see the nodes: %r; next look in %.0f s", error, LOOK_S)
            await asyncio.sleep(LOOK_S)

    async def keep(self) -> None:
        """Saves, sweeps and tells, once a second. It waits for no other process, because leases end
        that are not kept each second."""
        for looks_count in itertools.count(1):
            self.save_learned()
            self.save_removing()
            self.save_asked()
            if self._usage_parts or looks_count % self._usage_looks_count == 0:
                self.save_usage()
            self._sweep()
            self._shell.tell_jobs()
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
        """Saves what was learned and all of how models were used, before this process ends."""
        self.save_learned()
        self.save_asked()
        self._usage_parts = []  # a new round, of all
        self.save_usage()
        while self._usage_parts:
            self.save_usage()

    def save_usage(self) -> None:
        """Begins a round with the accounts of clients, and looks at one part of how models were
        used; what is as it was is not written again. The next parts of the round are for the next
        looks, because all of them at once would keep tickets waiting: 0.4 s for 10,000 models."""
        core = self._shell.core
        if not self._usage_parts:
            if (accounts := self._accounts()) != self._accounts_saved:
                if self._store.save_accounts(accounts):
                    self._accounts_saved = accounts
            names = core.used_models
            firsts = range(0, max(1, len(names)), USAGE_PART_COUNT)
            self._usage_parts = [names[first : first + USAGE_PART_COUNT] for first in firsts]
            self._usage_part = 0
        part, exported = self._usage_part, core.export_usage(self._usage_parts.pop(0))
        if part:  # what is no model's is in the first
            exported["reuse"] = {"models": exported["reuse"]["models"]}
        digest = _digest(exported)
        if digest != self._usage_saved.get(part) and not self._store.save_usage(part, exported):
            self._usage_parts = []  # the next round begins with the first, which the others need
            return
        self._usage_saved[part] = digest
        self._usage_part += 1
        if not self._usage_parts and self._store.drop_usage_from(self._usage_part):
            for beyond in [n for n in self._usage_saved if n >= self._usage_part]:
                del self._usage_saved[beyond]

    def _accounts(self) -> list[list[Any]]:
        return self._shell.core.export_accounts()

    def save_removing(self) -> None:
        """Saves which models are being removed, so that those removed by now leave the state
        file."""
        removing = self._shell.core.export_removing()
        if removing != self._removing_saved and self._store.save_removing(removing):
            self._removing_saved = removing

    def save_asked(self) -> None:
        """Saves which loads without a request are yet to begin."""
        rows = self._shell.core.export_asked()
        if rows != self._asked_saved and self._store.save_asked(rows):
            self._asked_saved = rows

    def save_learned(self) -> None:
        """Saves what was learned of models, and which models were removed."""
        core = self._shell.core
        removed = core.export_removed_models()
        if removed != self._removed_saved and self._store.save_removed_models(removed):
            self._removed_saved = removed
        count = core.learned_changes_count
        if count != self._learned_saved_count:
            rows, forgotten = core.learned_since(self._learned_saved_count)
            if self._store.save_learned(rows, forgotten):
                self._learned_saved_count = count


def _digest(usage: dict[str, Any]) -> bytes:
    """Returns the digest of an export without its instant, which differs each time."""
    values = {name: value for name, value in usage.items() if name != "exported_ns"}
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=16).digest()
