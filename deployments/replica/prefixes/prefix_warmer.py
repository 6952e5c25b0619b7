"""Warms the stable prefixes of one model while it is resident and idle (G1, G5, G6).

A pre-warm goes to the engine beside the requests, not as one of them: it is in no account, a model
that is only pre-warmed counts as idle, and a pre-warm begins only while no request is in flight. A
request that comes meanwhile ends it, and so waits for one step of the engine at most; what was
computed until then stays in the cache.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from arbiter.core import events as ev
from arbiter.errors import EngineLost
from arbiter.units import HolderId, Span
from deployments import messages
from deployments.replica.background import detached_task, log_failure
from deployments.replica.held_model import HeldModel, HolderState
from deployments.replica.prefixes.prefix_book import FRESH, KnownPrefix, PrefixBook, WarmCause
from deployments.requests import prefixes
from deployments.requests.prefixes import Prefix, PrefixEnd

logger = logging.getLogger("arbiter.residency")

PREFIX_MOST_BYTES = 1 << 20  # twice a context of 128k tokens; a replica keeps 64 of each model
# A prefill of a whole context of 128k tokens takes less, also without a GPU at 2,000 tokens/s.
WARM_S = 120.0


class Clock(Protocol):
    """What the sweep waits by."""

    def now_ns(self) -> int: ...

    async def wait(self, event: asyncio.Event, until_ns: int) -> None:
        """Returns when the event is set or the time has come."""


class MonotonicClock:
    """The machine's own monotonic clock."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    async def wait(self, event: asyncio.Event, until_ns: int) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, (until_ns - self.now_ns()) / 1e9)):
                await event.wait()


CLOCK: Clock = MonotonicClock()


class PrewarmFailed(Exception):
    """The engine did not warm a prefix, and says why."""


@dataclass(frozen=True, slots=True)
class Warmed:
    """What an engine says of a pre-warm. `skipped`: why there was nothing to do."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    skipped: str = ""
    has_no_cache: bool = False


class PrefixWarmer:
    """One per held model whose engine may have a prefix cache, from its first load to its end."""

    def __init__(
        self,
        held: HeldModel,
        holder: HolderId,
        tell: Callable[[ev.Event], None],
        clock: Clock | None = None,
    ) -> None:
        self._held, self._holder, self._tell = held, holder, tell
        self._clock = clock or CLOCK
        self._book = PrefixBook(held.plan.prefixes)
        self._news = asyncio.Event()  # there may be something to warm now
        self._current: asyncio.Task[Warmed] | None = None
        self._has_cache = True  # until its engine says otherwise
        self._task = detached_task(self._run())
        self._task.add_done_callback(log_failure)

    # -- what happens to the model -------------------------------------------------------------

    def on_move(self, before: HolderState, to: HolderState) -> None:
        """Follows the model's change of state. Out of LOADING it has a new engine, or an empty
        cache."""
        if to is HolderState.RESIDENT:
            if before is HolderState.LOADING:
                self._has_cache = True
                self._book.on_load(self._clock.now_ns())
            self._news.set()
        else:
            self.interrupt()
        if to is HolderState.CLOSED:
            self._task.cancel()

    def interrupt(self) -> None:
        """Ends the pre-warm under way: a request begins, or the engine is about to go."""
        if self._current is not None:
            self._current.cancel()

    async def settled(self) -> None:
        """Returns when no pre-warm is at the engine."""
        if self._current is not None:
            await asyncio.wait({self._current})

    # -- who asks for what ---------------------------------------------------------------------

    def on_use(self, cut: PrefixEnd, chat: bytes, tenant: str) -> None:
        """Notes that a request begins with a prefix; `chat`: its body."""
        if self._knows(cut, chat, tenant):
            self._book.on_use(cut.key, self._clock.now_ns())

    def on_session(self, cut: PrefixEnd | None, chat: bytes, tenant: str) -> None:
        """Warms for a session that a client opens, whose chats begin with a prefix, or with what is
        declared."""
        now_ns = self._clock.now_ns()
        if cut is not None and self._knows(cut, chat, tenant):
            self._book.ask(cut.key, WarmCause.SESSION, now_ns)
        self._book.ask_untouched(WarmCause.SESSION, FRESH, now_ns, tenant)
        self._news.set()

    def forget_tenant(self, tenant: str) -> None:
        """Warms nothing more of what a tenant's requests brought; a removed tenant has no more."""
        self._book.forget_tenant(tenant)
        self.interrupt()

    def on_speech(self) -> None:
        """Warms for a person who begins to speak, whose words this model may have to answer."""
        self._book.ask_untouched(WarmCause.SPEECH, Span(0), self._clock.now_ns())
        self._news.set()

    def _knows(self, cut: PrefixEnd, chat: bytes, tenant: str) -> bool:
        """Learns a prefix that is new; False: it is too large to be kept."""
        if self._book.is_too_large(cut.key):
            return False
        if not self._book.knows(cut.key):
            prefix = prefixes.prefix_of(json.loads(chat), cut, tenant)
            if len(prefix.body) > PREFIX_MOST_BYTES:
                self._book.add_too_large(cut.key, tenant)
                return False
            self._book.add(prefix, self._clock.now_ns())
        return True

    # -- the work ------------------------------------------------------------------------------

    async def _run(self) -> None:
        every = self._held.plan.rewarm
        sweep_ns = self._clock.now_ns() + every
        while True:
            self._news.clear()
            now_ns = self._clock.now_ns()
            if self._is_resident and self._book.next():
                await self._warm_when_idle()
            elif now_ns >= sweep_ns:
                self._book.sweep(now_ns)
                sweep_ns = now_ns + every
            else:
                await self._clock.wait(self._news, sweep_ns)

    @property
    def _is_resident(self) -> bool:
        return self._held.state is HolderState.RESIDENT and self._has_cache

    async def _warm_when_idle(self) -> None:
        held = self._held
        await held.requests.all_ended()
        prefix = self._book.next()
        if not self._is_resident or prefix is None:
            return
        assert prefix.cause is not None
        began_ns, cause = time.monotonic_ns(), prefix.cause
        self._current = task = detached_task(self._ask_engine(prefix.prefix))
        await asyncio.wait({task})
        self._current = None
        if task.cancelled() or held.state is not HolderState.RESIDENT:
            return self._book.on_interrupt(prefix)
        took = Span(time.monotonic_ns() - began_ns)
        self._note(prefix, cause, task, took)

    def _note(
        self, prefix: KnownPrefix, cause: WarmCause, ended: asyncio.Task[Warmed], took: Span
    ) -> None:
        """Takes what came of a pre-warm, and tells the event log."""
        error = ended.exception()
        if error is None and not ended.result().skipped:
            self._book.on_warmed(prefix)
        else:
            self._book.on_failure(prefix)
        if error is None:
            warmed, outcome = ended.result(), "warmed"
            self._has_cache = not warmed.has_no_cache
            if warmed.skipped:
                return logger.info("%s is not warmed: %s", prefix.prefix.name, warmed.skipped)
        elif isinstance(error, (PrewarmFailed, EngineLost, TimeoutError)):
            warmed, outcome = Warmed(), str(error) or f"no answer within {WARM_S:.0f} s"
            logger.warning("%s: a prefix is not warmed: %s", self._held.ticket, outcome)
        else:
            raise error  # a bug
        self._tell(
            ev.Prewarmed(
                self._holder,
                self._held.ticket,
                self._held.model,
                prefix.prefix.name,
                cause.value,
                outcome,
                warmed.prompt_tokens,
                warmed.cached_tokens,
                took,
            )
        )

    async def _ask_engine(self, prefix: Prefix) -> Warmed:
        """Raises PrewarmFailed, EngineLost, TimeoutError."""
        link = self._held.link
        if link is None:
            raise EngineLost(self._held.model, self._held.ticket)
        headers = {
            "content-type": "application/json",
            "x-request-id": prefix.name,
            messages.TENANT_HEADER: prefix.tenant,
        }
        async with asyncio.timeout(WARM_S):
            answer = link.stream("POST", prefixes.ROUTE, headers, prefix.body)
            async with contextlib.aclosing(answer):
                parts = [part async for part in answer]
        head, *rest = parts
        assert isinstance(head, messages.ResponseHead), "an answer begins with its head"
        return _read(head, b"".join(part for part in rest if isinstance(part, bytes)))


def _read(head: messages.ResponseHead, body: bytes) -> Warmed:
    """Raises PrewarmFailed."""
    if head.status == 404:
        return Warmed(skipped=f"its engine has no {prefixes.ROUTE}", has_no_cache=True)
    try:
        parsed = json.loads(body)
        if head.status == 200:
            return Warmed(**parsed)
        cause = parsed["error"]["message"]  # OpenAI's form
    except (ValueError, LookupError, TypeError):
        cause = "no form that it may have"
    raise PrewarmFailed(f"the engine answered {head.status}: {cause}")
