"""A real arbiter under a test: real Ray, real node agent and zygote, engines that are honest about
memory and do nothing else.
"""

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from arbiter.client.admin import call_arbiter, find_arbiter, start_arbiter, stop_arbiter, subscribe
from arbiter.errors import ArbiterUnavailable, RequestError
from arbiter.node.procfs import process, processes
from arbiter.protocol import messages, ray_internals
from arbiter.units import MIB, TicketId, seconds
from deployments.config import boot
from deployments.config.schema import parse_table
from deployments.messages import ResponseHead
from deployments.replica.residency import Residency
from deployments.replica.use import read_response
from tests.support.holder import RESTING, Holder
from tests.support.waits import WITHIN_S, eventually, pauses

ENGINE = "tests.support.fake_engine:build"
LOOK_S = 0.02  # between two looks at the state
CONTEXT = 24 * MIB  # an empty fake engine holds about half of this, private


def model(mib: int, **engine_args: Any) -> dict[str, Any]:
    """A model that holds `mib` of touched memory when loaded."""
    words = "keep_warm_s pin can_sleep allow_oversize floor dispatch stable_prefixes".split()
    own = {k: engine_args.pop(k) for k in words if k in engine_args}
    args = {"bytes": mib * MIB, **engine_args}
    host_bytes = mib * MIB if own.get("can_sleep", True) else 0
    need = {"weights": mib * MIB, "context": CONTEXT, "host": host_bytes}
    return {"source": "fake", "need": need, "engine_args": args, "keep_warm_s": -1, **own}


def capability(role: str = "text", **models: Any) -> dict[str, Any]:
    return {"role": role, "engine": ENGINE, "models": models}


def two(**engine_args: Any) -> dict[str, Any]:
    """Two models of which only one fits."""
    return {"chat": capability(a=model(200, **engine_args)), "other": capability(b=model(200))}


async def embedded(residency: Residency, name: str) -> tuple[ResponseHead, bytes]:
    """The whole answer of a model to one request for embeddings."""
    async with residency.use(name) as engine:
        return await read_response(engine.stream("POST", "/v1/embeddings", {}, b"{}"))


class NoAnswer(AssertionError):
    """Nothing could be compared."""


class LiveArbiter:
    """The arbiter and everything a test asks of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.holders: list[Any] = []
        self._own: list[Any] = []  # whose processes no other test has

    async def start(
        self,
        capabilities: dict[str, Any],
        mib: int,
        gpus: str = "",
        timeouts: Mapping[str, float] | None = None,
        **arbiter: Any,
    ) -> None:
        arenas: dict[str, int] = {
            "cpu": round(mib * MIB / 0.9),
            "host": 512 * MIB,
        }  # the wiggle room on top
        arenas["gpu"] = round((mib + 512) * MIB / 0.9)  # and the margin
        own: dict[str, Any] = {"arenas": arenas, "state_file": str(self.folder / "arbiter.sqlite")}
        # A spare worker's start would take a core for a second, and each trade of two models two.
        own |= {"spare_workers": 0, "collate_s": 0, **arbiter}
        self.table = parse_table({"arbiter": own, "capabilities": capabilities})
        made = replace(boot.boot(self.table), usage_looks_count=1)  # so that no test waits for it
        if gpus:
            made = replace(made, agent=replace(made.agent, gpus=gpus))
        if timeouts:
            settings = made.configuration.settings
            spans = {name: seconds(long_s) for name, long_s in timeouts.items()}
            settings = replace(settings, timeouts=replace(settings.timeouts, **spans))
            made = replace(made, configuration=replace(made.configuration, settings=settings))
        await start_arbiter(made)
        await self.until(lambda s: s["devices"] and s["devices"][0]["physical_free_bytes"])
        # A test that is over sooner would leave a zygote behind that the agent does not know yet.
        zygote: int = await eventually(self._zygote)
        assert zygote

    def holder(self, name: str = "chat") -> Any:
        """A test may kill it."""
        made = RESTING.take(name)
        self.holders.append(made)
        return made

    def own_holder(self, name: str = "chat") -> Any:
        """One whose code a test may change."""
        made = Holder.remote(name)  # type: ignore[attr-defined]
        self._own.append(made)
        return made

    async def state(self) -> messages.Plain:
        answer: messages.Plain = await call_arbiter("state")
        return answer

    async def until(
        self, condition: Callable[[messages.Plain], Any], within_s: float = WITHIN_S
    ) -> messages.Plain:
        """The first state in which it holds."""
        last: Any = None
        pause_s = pauses(LOOK_S, 0.1)
        try:
            async with asyncio.timeout(within_s):
                while True:
                    with contextlib.suppress(ArbiterUnavailable):
                        last = await self.state()
                        if condition(last):
                            return dict(last)
                    await asyncio.sleep(next(pause_s))
        except TimeoutError:
            pass
        told = [f"{line['kind']} {line}" for line in (await self.events())[-30:]]
        raise AssertionError("\n".join([f"not within {within_s} s; last state: {last}", *told]))

    async def soon(
        self, condition: Callable[[messages.Plain], Any], within_s: float
    ) -> messages.Plain:
        """The first state in which it holds, counted in looks of 20 ms: a machine that stalls what
        is looked at stalls the looks as well."""
        looks = range(round(within_s / LOOK_S))
        for _ in looks:
            last = await self.state()
            if condition(last):
                return dict(last)
            await asyncio.sleep(LOOK_S)
        raise AssertionError(f"not within {len(looks)} looks, {within_s} s and more; last: {last}")

    async def states(self) -> dict[str, str]:
        return {t["model"]: t["state"] for t in (await self.state())["tickets"]}

    async def events(self, kind: str = "") -> list[messages.Plain]:
        lines: list[messages.Plain] = await call_arbiter("events", 0, 0.1)
        return [line for line in lines if kind in ("", line["kind"])]

    async def agent(self) -> Any:
        name = messages.agent_name(ray_internals.own_node())
        return ray.get_actor(name, namespace=messages.NAMESPACE)

    async def engines(self) -> dict[str, list[int]]:
        """Living processes by ticket, root first."""
        pids_by_ticket: dict[str, list[int]] = await (await self.agent()).engines.remote()
        return pids_by_ticket

    async def pids(self) -> dict[str, int]:
        pids_by_name: dict[str, int] = await (await self.agent()).pids.remote()
        return pids_by_name

    async def _zygote(self) -> int:
        return (await self.pids())["zygote"]

    async def arbiter_pid(self) -> int:
        pid: int = await call_arbiter("pid")
        return pid

    async def unload(self, name: str) -> None:
        """Has an idle model leave, and waits until it has."""
        state = await self.until(lambda s: any(
            t["model"] == name and t["idle_s"] is not None for t in s["tickets"]
        ))  # fmt: skip
        [ticket] = [t for t in state["tickets"] if t["model"] == name]
        await call_arbiter("unload", TicketId(ticket["ticket"]))
        await self.until(lambda s: not any(t["model"] == name for t in s["tickets"]))

    async def books_are_true(self) -> None:
        """Every engine process belongs to exactly one ticket on the books, nothing runs that is
        not on them, each device's books add up, and what is measured is what is charged."""

        async def wrong() -> str:
            try:
                state, engines = await self.state(), await self.engines()
            except (RequestError, ray.exceptions.RayError, ValueError) as error:
                return repr(error)
            return _wrong(state, engines)

        problem = ""
        try:
            async with asyncio.timeout(WITHIN_S):
                while problem := await wrong():
                    await asyncio.sleep(0.05)
        except TimeoutError:
            if not problem:
                raise NoAnswer(f"neither arbiter nor agent answered for {WITHIN_S} s") from None
            raise AssertionError(problem) from None

    def kill_holders(self) -> None:
        while self.holders:
            ray.kill(self.holders.pop())

    async def close(self) -> None:
        for made in self._own:
            ray.kill(made)
        await RESTING.give_back(self.holders)
        await asyncio.to_thread(stop_arbiter, 5.0)
        assert find_arbiter() is None


CHARGED = ("loading", "resident", "draining", "asleep", "reclaiming")


def _wrong(state: messages.Plain, engines: dict[str, list[int]]) -> str:
    """What is wrong with the books; empty when nothing is."""
    held = {t["ticket"]: t for t in state["tickets"] if t["state"] in CHARGED}
    copies = {t for t in held if (held[t]["lease"] or {}).get("on_host")}  # of files: no engines
    if held.keys() - copies != engines.keys():
        return f"tickets {sorted(held)} but engines {sorted(engines)}"
    for device in state["devices"]:
        parts = device["free_bytes"] + device["charged_bytes"] + device["foreign_bytes"]
        if parts != device["budget_bytes"]:
            return f"{device} does not add up"
    for ticket in held.values():
        charged, measured = (sum(ticket[f"{k}_bytes"].values()) for k in ("charged", "measured"))
        if not 0 < measured <= charged:
            return f"{ticket['ticket']}: measured {measured}, charged {charged}"
    orphans = engine_pids() - {pid for pids in engines.values() for pid in pids}
    return f"engine processes nobody owns: {orphans}" if orphans else ""


def engine_pids() -> set[int]:
    """Every living process that looks like an engine of this node's zygote."""
    pids, node = set(), ray_internals.own_node()
    for p in processes().values():
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{p.pid}/comm").read_text()
            command = Path(f"/proc/{p.pid}/cmdline").read_text()
            if p.alive and name.startswith("engine:") and f"/{node}/" in command:
                pids.add(p.pid)
    return pids


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


async def gone(pid: int, within_s: float = WITHIN_S) -> None:
    """Dead; a zombie counts."""
    async with asyncio.timeout(within_s):
        while (running := process(pid)) is not None and running.alive:
            await asyncio.sleep(0.01)


async def first(kind: str, after: int = 0) -> messages.Plain:
    """The first event of a kind after a sequence number, once there is one."""
    async with asyncio.timeout(WITHIN_S):
        async for event in subscribe(after):
            if event["kind"] == kind:
                return dict(event)
    raise AssertionError("a subscription does not end")


@contextlib.asynccontextmanager
async def live_arbiter(
    capabilities: dict[str, Any] | None = None,
    mib: int = 400,
    gpus: str = "",
    timeouts: Mapping[str, float] | None = None,
    **arbiter: Any,
) -> AsyncIterator[LiveArbiter]:
    """An arbiter with `mib` to lend on each device; `gpus`: what finds those, else there is one;
    `timeouts`: seconds, in place of the core's own (`Timeouts`)."""
    with tempfile.TemporaryDirectory(prefix="live-") as folder:
        running = LiveArbiter(Path(folder))
        try:
            standard = {"chat": capability(a=model(100))}
            await running.start(capabilities or standard, mib, gpus, timeouts, **arbiter)
            yield running
        except BaseException:  # what a test leaves that failed is not for the next
            running.kill_holders()
            raise
        finally:
            await running.close()
