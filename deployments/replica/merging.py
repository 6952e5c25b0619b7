"""A copy of a model with one adapter in its weights, while that adapter takes nearly all of the
model's requests (F7, docs/adr/0043).

The copy is a model of its own: `small-chat+merged`, with a ticket, an engine and a keep-warm time.
The arbiter grants it free room or refuses it, so it costs no other model its place. A request goes
to the copy while that is resident and its adapter is that of the request, in the state
in which it was merged; every other request goes to the model. So none waits for the copy, and none
gets values of an adapter that was replaced or removed since.
"""

import asyncio
import contextlib
import logging
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from arbiter.core.decisions import Reason
from arbiter.errors import RequestError
from deployments.adapters.catalogue import CatalogueEntry
from deployments.adapters.safe_files import AdaptersAway
from deployments.adapters.store import CheckedAdapters, EngineCatalogue
from deployments.config import safetensors_header
from deployments.config.file_threads import in_thread
from deployments.replica.held_model import HeldModel, HolderState, new_ticket
from deployments.replica.lifecycle import unloading
from deployments.replica.residency import Residency

logger = logging.getLogger("arbiter.residency")

LOOK_S = 2.0  # without requests an adapter that is replaced has left after so long, as a model has
# The copy goes below this part of the share that began it: far enough apart that a share which
# swings about the bound does not load it again and again.
STAYS_ABOVE = 0.5

Name = tuple[str, str]  # of an adapter: the tenant that it belongs to, and its full name


class TrafficShare:
    """Counts which part of the last requests each name had. `window`: how many requests."""

    def __init__(self, window: int) -> None:
        self._last: deque[object] = deque(maxlen=window)
        self._counts: Counter[object] = Counter()

    def note(self, name: object) -> None:
        if len(self._last) == self._last.maxlen:
            oldest = self._last[0]
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
        self._last.append(name)
        self._counts[name] += 1

    def of(self, name: object) -> float | None:
        """Returns a name's part of the last requests; None until there were as many as the window
        holds."""
        if len(self._last) < (self._last.maxlen or 0):
            return None
        return self._counts[name] / len(self._last)

    def forget(self) -> None:
        self._last.clear()
        self._counts.clear()


@dataclass(slots=True)
class MergedCopy:
    """One adapter, as it was when its copy was begun."""

    entry: CatalogueEntry
    name: Name
    held: HeldModel | None = None  # None: its plan is being made
    over: asyncio.Event = field(default_factory=asyncio.Event)  # no request goes to it any more


class Merging:
    """The merged copies of one model on one holder, at most one at a time."""

    def __init__(self, residency: Residency, model: str, config: dict[str, Any]) -> None:
        """`config`: of the model's engine, with `config["adapters"]["merge"]`."""
        merge = config["adapters"]["merge"]
        self.config = config
        self._residency, self._model = residency, model
        self._begins_at: float = merge["share"]
        self._share = TrafficShare(merge["requests"])
        self._catalogue = EngineCatalogue(config)
        self._copy: MergedCopy | None = None

    def forget_tenant(self, tenant: str) -> None:
        """Ends the copy of a removed tenant's own adapter."""
        if self._copy is not None and self._copy.name[0] == tenant:
            self.end()

    async def served_by(self, served: str, tenant: str) -> str:
        """Notes a request, and returns the held model whose engine is to answer it. A request for
        the model itself waits for no look into the folder of its adapters. Raises AdaptersAway."""
        entry = await self._found(served, tenant)
        name = entry and (entry.tenant, served)
        self._share.note(name)
        copy = self._copy
        if copy is None:
            if entry and name and (self._share.of(name) or 0.0) >= self._begins_at:
                self._begin(MergedCopy(entry, name))
            return self._model
        if not self._has_traffic(copy) or (name == copy.name and entry != copy.entry):
            copy.over.set()
        held = copy.held
        if copy.over.is_set() or entry != copy.entry or held is None:
            return self._model
        is_there = self._residency.models.get(held.model) is held
        return held.model if is_there and held.state is HolderState.RESIDENT else self._model

    def end(self) -> None:
        """Keeps requests away from its copy, which leaves then."""
        if self._copy is not None:
            self._copy.over.set()

    async def _found(self, served: str, tenant: str) -> CatalogueEntry | None:
        """Returns the adapter's entry; None for the model itself, and for a name whose request the
        model's engine refuses. Raises AdaptersAway."""
        if served == self._model:
            return None
        try:
            return await self._catalogue.find(served, tenant)
        except AdaptersAway:
            raise
        except RequestError:
            return None

    def _has_traffic(self, copy: MergedCopy) -> bool:
        share = self._share.of(copy.name)
        return share is None or share >= STAYS_ABOVE * self._begins_at

    async def _end_if_useless(self, copy: MergedCopy) -> None:
        """Ends a copy that is of no use any more. What a file server does not say, or not within
        LOOK_S, is asked again."""
        owner, served = copy.name
        with contextlib.suppress(AdaptersAway, TimeoutError):
            async with asyncio.timeout(LOOK_S):
                if not self._has_traffic(copy) or await self._found(served, owner) != copy.entry:
                    copy.over.set()

    def _begin(self, copy: MergedCopy) -> None:
        """Begins a copy. After a copy that found no room, the next is asked for a window of
        requests later."""
        self._share.forget()
        self._copy = copy
        self._residency.background.begin(self._run(copy))

    async def _run(self, copy: MergedCopy) -> None:
        """Runs a copy from the first step to the end of its engine."""
        try:
            checked = await in_thread(self.config["model"], CheckedAdapters.of, self.config)
            published = await checked.take(copy.entry)
            served = copy.name[1]
            plans = self._residency.plans
            plan = await plans.merged(self._model, served, published.path)
            if copy.over.is_set() or plan.model in self._residency.models:
                return  # not wanted any more, or the copy under earlier settings is still leaving
            copy.held = held = HeldModel(plan, new_ticket(plan.model))
            held.demand.is_wanted = True
            logger.info("%s: merges %s into a copy of %s", held.ticket, served, self._model)
            self._residency.begin_load(held)
            await self._until_over(copy, held)
        except (RequestError, OSError, safetensors_header.BadHeader) as error:
            logger.warning("%s is not merged into a copy: %s", copy.name[1], error)
        finally:
            self._copy = None

    async def _until_over(self, copy: MergedCopy, held: HeldModel) -> None:
        """Requests that the copy has begun are finished with the values with which they began."""
        while held.state is not HolderState.CLOSED:
            await self._end_if_useless(copy)
            if copy.over.is_set() and held.state is HolderState.RESIDENT:
                unloading.retire(self._residency, held)
                await held.requests.all_ended()
                return unloading.end(self._residency, held, Reason.MANUAL)
            if copy.over.is_set() and held.state in (HolderState.QUEUED, HolderState.LOADING):
                return unloading.end(self._residency, held, Reason.MANUAL)
            await _over_or_next_look(copy.over)


async def _over_or_next_look(over: asyncio.Event) -> None:
    """Returns when the copy is over, or it is time to look again."""
    if over.is_set():
        return await asyncio.sleep(LOOK_S)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LOOK_S):
            await over.wait()
