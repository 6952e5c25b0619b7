"""Holders that are a process of their own, and the processes that one test leaves to the next."""

import asyncio
import contextlib
import os
import time
from typing import Any

import ray

from arbiter.client.holder import HolderClient
from arbiter.core.decisions import Reason
from arbiter.core.events import SpeechStarted
from arbiter.core.types import ANYBODY, Client, Priority
from arbiter.errors import ArbiterUnavailable, GrowthRefused
from arbiter.units import Bytes
from deployments.replica.lifecycle import resize, unloading
from deployments.replica.prefixes import prefix_warmer
from deployments.replica.prefixes.prefix_warmer import MonotonicClock
from deployments.replica.residency import Residency
from deployments.requests.prefixes import PrefixEnd
from tests.support.waits import WITHIN_S

RESTS_WITHIN_S = 4.0
MOST_AT_REST = 4  # of 120 MB each


class ShiftedClock(MonotonicClock):
    """The machine's own, put forward by hand."""

    def __init__(self) -> None:
        self._shift_ns = 0
        self._waits: set[asyncio.Task[bool]] = set()

    def now_ns(self) -> int:
        return super().now_ns() + self._shift_ns

    def shift(self, by_s: float) -> None:
        self._shift_ns += round(by_s * 1e9)
        for wait in self._waits:
            wait.cancel()

    async def wait(self, event: asyncio.Event, until_ns: int) -> None:
        wait = asyncio.ensure_future(event.wait())
        self._waits.add(wait)
        try:
            await asyncio.wait({wait}, timeout=max(0.0, (until_ns - self.now_ns()) / 1e9))
        finally:
            wait.cancel()
            self._waits.discard(wait)


@ray.remote(num_cpus=0, max_concurrency=1_000)
class Holder:
    """A process with a Residency, as a Serve replica has one, without Serve around it."""

    def __init__(self, name: str) -> None:
        self.begin(name)

    def begin(self, name: str) -> None:
        """Another holder from here on, of which nothing has been asked yet."""
        self.wait_for_an_arbiter(WITHIN_S)
        self.clock = prefix_warmer.CLOCK = ShiftedClock()
        self.residency = Residency.start(name)
        self.kept: dict[str, Any] = {}

    def wait_for_an_arbiter(self, within_s: float) -> None:
        """How long its requests do so, in place of UNREACHABLE_S: where three clusters share two
        cores, Ray has taken longer than that to restart an arbiter."""
        HolderClient.wait_until_joined.__defaults__ = (within_s,)

    async def rest(self) -> bool:
        """Ends this holder as a replica ends. Whether nothing of it is left here: then the process
        may be another holder."""
        for use in self.kept.values():
            use.release()
        await self.residency.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        return not left or not (await asyncio.wait(left, timeout=RESTS_WITHIN_S / 2))[1]

    async def pid(self) -> int:
        await self.residency.client().wait_until_joined()
        return os.getpid()

    async def ask(
        self,
        name: str,
        deadline_s: float | None = None,
        client: Client = ANYBODY,
        priority: Priority = Priority.NORMAL,
    ) -> int:
        """HTTP status of one call."""
        how = {"deadline_s": deadline_s, "client": client, "priority": priority}
        async with self.residency.use(name, **how) as engine:  # type: ignore[arg-type]
            parts = [p async for p in engine.stream("POST", "/v1/chat/completions", {}, b"{}")]
        return int(parts[0].status)  # type: ignore[union-attr]  # the head comes first

    async def post(self, name: str, path: str, body: bytes) -> bytes:
        """The whole answer of its engine."""
        async with self.residency.use(name) as engine:
            headers = {"content-type": "application/json"}
            parts = [p async for p in engine.stream("POST", path, headers, body)]
        return b"".join(p for p in parts if isinstance(p, bytes))

    async def chat(self, name: str, cut: PrefixEnd, body: bytes) -> None:
        """One call that begins with a stable prefix."""
        async with self.residency.use(name) as engine:
            engine.note_stable_prefix(cut, body, "default")
            async for _ in engine.stream("POST", "/v1/chat/completions", {}, body):
                continue

    async def stream(self, name: str) -> int:
        """How many events came, some of them perhaps in one piece."""
        body = b'{"stream": true}'
        async with self.residency.use(name) as engine:
            parts = [p async for p in engine.stream("POST", "/v1/chat/completions", {}, body)]
        return b"".join(p for p in parts if isinstance(p, bytes)).count(b"data: ")

    async def keep(self, name: str) -> str:
        """Begin a long use; its ticket."""
        self.kept[name] = use = self.residency.use(name)
        await use.__aenter__()
        return str(use.ticket)

    async def let_go(self, name: str) -> None:
        self.kept.pop(name).release()

    async def grow(self, name: str) -> None:
        await self.residency.grow(name)

    async def give_back(self, name: str) -> None:
        await resize.give_back(self.residency, name)

    async def end(self, name: str) -> None:
        """Its ticket is given back now; a heartbeat need not say first that it is idle."""
        unloading.end(self.residency, self.residency.models[name], Reason.MANUAL)

    async def lives(self) -> dict[str, str]:
        return {m: held.state.value for m, held in self.residency.models.items()}

    async def waiting(self, name: str) -> int:
        held = self.residency.models.get(name)
        return len(held.demand.waiters) if held else 0

    async def calls(self) -> int:
        return self.residency.client().calls_count

    async def unreachable_s(self) -> float:
        return self.residency.client().session.unreachable_s

    async def warm_ns(self, name: str, times: int) -> float:
        """Of one use of a resident model."""
        began = time.perf_counter_ns()
        for _ in range(times):
            async with self.residency.use(name):
                pass
        return (time.perf_counter_ns() - began) / times

    async def load_ms(self, name: str) -> float:
        """From asking to the first use."""
        began = time.perf_counter()
        async with self.residency.use(name):
            return (time.perf_counter() - began) * 1e3

    async def grant_ms(self, name: str, more: Bytes) -> float:
        """From asking for more bytes of a resident model to the grant, asked again where the
        arbiter ends meanwhile or has no reading yet. Its engine stays as it is, so that heartbeats
        give them back."""
        held, client = self.residency.models[name], self.residency.client()
        began = time.perf_counter()
        while True:
            with contextlib.suppress(ArbiterUnavailable, GrowthRefused):
                await client.grow(held.ticket, more, client.timeouts.barrier)
                return (time.perf_counter() - began) * 1e3

    async def shift_clock(self, by_s: float) -> None:
        """Puts the clock of its sweeps forward."""
        self.clock.shift(by_s)

    async def speak(self) -> None:
        """As voice activity detection does that hears a person begin."""
        client = self.residency.client()
        client.tell(SpeechStarted(self.residency.holder))

    async def speak_often(self, times: int) -> int:
        """How many events wait for the arbiter then."""
        for _ in range(times):
            await self.speak()
        return len(self.residency.client().session._outbox)

    async def session(self) -> str:
        """Another one after each join."""
        return str(self.residency.client().session._keepalive.hex())

    async def begin_work(self) -> None:
        """That does not end with this holder."""
        self.work = asyncio.ensure_future(asyncio.Event().wait())

    async def close(self) -> None:
        await self.residency.close()


class Resting:
    """Processes whose holders have ended, on one cluster: the start of one takes more than a second
    of a core. A process that does not end its holder soon, or that keeps anything of it, is killed;
    so is one whose code a test has changed, which has it to itself."""

    def __init__(self) -> None:
        self._idle: list[Any] = []
        self._cluster = ""

    def take(self, name: str) -> Any:
        """A holder that has asked for nothing yet."""
        address = ray.get_runtime_context().gcs_address
        if address != self._cluster:
            self._cluster, self._idle = address, []
        while self._idle:
            made = self._idle.pop()
            try:
                ray.get(made.begin.remote(name), timeout=RESTS_WITHIN_S)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                ray.kill(made)  # it has died meanwhile, or hangs
                continue
            return made
        return Holder.remote(name)  # type: ignore[attr-defined]

    async def give_back(self, holders: list[Any]) -> None:
        for made, is_clean in zip(
            holders, await asyncio.gather(*map(_rests, holders)), strict=True
        ):
            if is_clean and len(self._idle) < MOST_AT_REST:
                self._idle.append(made)
            else:
                ray.kill(made)


async def _rests(made: Any) -> bool:
    try:
        async with asyncio.timeout(RESTS_WITHIN_S):
            return bool(await made.rest.remote())
    except (TimeoutError, ray.exceptions.RayError):
        return False  # it is stopped or dead, or the arbiter does not answer it


RESTING = Resting()
