"""Random kills of any process of the whole graph while clients stream from its real engines.

    python -m benchmarks.graph_chaos --kills 50 --seed 3

Serve's controller, HTTP proxy, front and replicas, the arbiter, node agent, zygote and engines. A
request is answered, refused with a typed error, or cut off because what its connection ended at
was killed: proxy or front, which alone may leave a client without a last word. The figure is in
the last lines.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import report
from benchmarks.calls import Call, calls, models_of, spoken
from benchmarks.tally import Tally, end
from tests.graph.conftest import KEEP_WARM_S, Graph, command_of, started
from tests.support.graph_processes import VICTIMS, books_are_true, victims

ANSWER_S = 120.0  # no request may take longer, whatever dies
LOOK_EVERY = 10  # kills between full comparisons of books and measurement
SETTLED_S = 60.0  # for books that are compared while loads come and go
SERVED_S = 60.0  # between two kills a client is served, or a minute has passed
# Until clients hear of the death of the process that has their connections.
INGRESS_S = 5.0
PAUSE_S = 4.0  # between tries while proxy or front is away
STREAMED = {"chat": 24, "vision": 8}  # tokens
CHATS = {"small-chat": "chat", "tiny-chat": "chat"}  # of the tests' table
INGRESS = {"proxy": "ray::ProxyActor", "front": "ray::ServeReplica:front:front"}
MORE = {"embedding replica": "ray::ServeReplica:embedding:embedding", **INGRESS}
TARGETS = (*sorted({*VICTIMS, *MORE}), "engine", "engine", "arbiter+replica", "node agent+zygote")


@dataclass
class Kills(Tally):
    ingress_killed_s: float = float("-inf")
    ingress_is_down: bool = False
    longest_down_s: float = 0.0

    def killed(self, target: str) -> None:
        self.kills[target] += 1
        if target in INGRESS:
            self.ingress_killed_s, self.ingress_is_down = time.monotonic(), True

    def note(self, model: str, outcome: str, began_s: float) -> None:
        now_s = time.monotonic()
        if not outcome.startswith("untyped"):
            if self.ingress_is_down and began_s > self.ingress_killed_s:
                self.ingress_is_down = False
                self.longest_down_s = max(self.longest_down_s, now_s - self.ingress_killed_s)
        elif self.ingress_is_down or self.ingress_killed_s > began_s - INGRESS_S:
            outcome = "cut_off_with_its_ingress"
        else:
            self.untyped.append(f"{model}: {outcome} after {now_s - began_s:.1f} s")
            print(self.untyped[-1], flush=True)
        self.answered(model, outcome, now_s - began_s)


def calls_of(graph: Graph) -> dict[str, Call]:
    """By model, of all capabilities. One of them has read aloud what others hear."""
    models = models_of(graph.table)
    known = calls(spoken(graph.url, models["tts"]))
    for capability, tokens in STREAMED.items():
        known[capability] = known[capability].streamed(tokens)
    homes = {model: capability for capability, model in models.items()} | CHATS
    return {model: known[capability] for model, capability in homes.items()}


async def ask(http: aiohttp.ClientSession, graph: Graph, model: str, call: Call) -> str:
    """How one request ended, in a word; `untyped: ...` where nothing said why. `model` may be
    `base:adapter`."""
    body, kind = call.body(model)
    try:
        async with http.post(
            graph.url + call.path, data=body, headers={"content-type": kind}
        ) as answer:
            said = await answer.read()
    except (aiohttp.ClientError, ConnectionError) as error:
        return f"untyped: {error!r}"
    except TimeoutError:
        return f"untyped: no answer in {ANSWER_S:.0f} s"
    return outcome_of(answer.status, answer.content_type == "text/event-stream", said)


def outcome_of(status: int, is_stream: bool, said: bytes) -> str:
    """Of a whole answer, be it JSON or a stream of events."""
    data = [line[6:] for line in said.splitlines() if line.startswith(b"data: ")]
    last = (data[-1] if data else b"") if is_stream else said
    if status == 200 and (last == b"[DONE]" or not is_stream):
        return "served"
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return str(json.loads(last)["error"]["code"])
    return f"untyped: status {status}, {last[:200]!r}"


def with_whole_front(config: dict[str, Any]) -> None:
    """As many requests in flight as the front takes where nothing is set: that of the tests takes
    fewer than there are clients here."""
    table = config["applications"][0]["deployments"][0]["user_config"]
    table["front"].pop("in_flight", None)


def find(graph: Graph, target: str) -> list[int]:
    """Pids of a target, as far as they exist now."""
    pids: list[int] = []
    for part in target.split("+"):
        if part in MORE:
            pids += [p for p in graph.workers() if MORE[part] in command_of(p)]
        else:
            pids += victims(graph, part)
    return pids


class Chaos:
    """Clients without pause, and kills beside them."""

    def __init__(self, graph: Graph, kills: int, minutes: float, seed: int) -> None:
        self.graph, self.kills, self.dice = graph, kills, random.Random(seed)
        self.ends_s = time.monotonic() + minutes * 60
        self.tally, self.stopping, self.is_paused = Kills(), False, False
        self.calls = calls_of(graph)

    async def run(self) -> Kills:
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            clients = [
                asyncio.ensure_future(self._client(http, m)) for m in self.calls for _ in "ab"
            ]
            await self._served_again(0)
            while (
                number := self.tally.kills_count
            ) < self.kills and time.monotonic() < self.ends_s:
                await self._kill(self.dice.choice(TARGETS))
                if self.tally.kills_count > number and (number + 1) % LOOK_EVERY == 0:
                    await self._look()
                    print(f"{number + 1} kills, {dict(self.tally.answers)}", flush=True)
            self.stopping = True
            await asyncio.gather(*clients)
            await self._settle(http)
        return self.tally

    async def _client(self, http: aiohttp.ClientSession, model: str) -> None:
        while not self.stopping:
            if self.is_paused:
                await asyncio.sleep(0.2)
                continue
            began_s = time.monotonic()
            self.tally.note(model, await self._ask(http, model), began_s)
            await asyncio.sleep(
                self.dice.random() * (PAUSE_S if self.tally.ingress_is_down else 0.5)
            )

    async def _ask(self, http: aiohttp.ClientSession, model: str) -> str:
        return await ask(http, self.graph, model, self.calls[model])

    async def _kill(self, target: str) -> None:
        before = self.tally.answers["served"]
        killed = end(await asyncio.to_thread(find, self.graph, target))
        self.tally.processes += killed
        if killed:
            self.tally.killed(target)
        await asyncio.sleep(self.dice.random() * 2.0)
        if killed:
            await self._served_again(before)

    async def _served_again(self, before: int) -> None:
        """So that each kill meets a system at work."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SERVED_S):
                while self.tally.answers["served"] <= before:
                    await asyncio.sleep(0.05)

    async def _look(self) -> None:
        """Books against measurement, until they agree once: with the load going on, and where that
        leaves no moment in which no ticket changes, with the load at rest."""
        self.tally.looks += 1
        if await self._comes_true(lambda: books_are_true(self.graph)):
            return
        self.tally.looks_at_rest += 1
        self.is_paused = True
        are_true = await self._comes_true(lambda: books_are_true(self.graph))
        self.is_paused = False
        if not are_true:
            self.tally.wrong.append(f"books differ from measurement: {self.graph.state()}")

    async def _comes_true(self, what: Callable[[], bool]) -> bool:
        end_s = time.monotonic() + SETTLED_S
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError, ValueError, StopIteration):  # away, or just gone
                if await asyncio.to_thread(what):
                    return True
            await asyncio.sleep(0.2)
        return False

    async def _settle(self, http: aiohttp.ClientSession) -> None:
        """Faults are over: everybody is served, and nothing is left that should not be."""
        for model in self.calls:
            end_s, answer = time.monotonic() + SETTLED_S, ""
            while answer != "served" and time.monotonic() < end_s:
                answer = await self._ask(http, model)
            if answer != "served":
                self.tally.wrong.append(f"{model} is not served after the faults: {answer}")
        await self._look()
        if not await self._comes_true(lambda: not self.graph.tickets("embedding")):
            self.tally.wrong.append(f"embedding tickets left, {KEEP_WARM_S} s after their last use")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=60.0, help="ends earlier after these")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    began_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as folder,
        started(Path(folder), with_whole_front) as graph,
    ):
        tally = asyncio.run(Chaos(graph, args.kills, args.minutes, args.seed).run())
    figures = tally.figures(time.monotonic() - began_s)
    figures["longest_without_ingress_s"] = round(tally.longest_down_s, 1)
    report.write("graph_chaos", figures, seed=args.seed, label=f"seed{args.seed}")
    print(f"longest time without proxy or front: {tally.longest_down_s:.1f} s")
    return tally.verdict()


if __name__ == "__main__":
    sys.exit(main())
