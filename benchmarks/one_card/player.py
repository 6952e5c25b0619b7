"""Plays the hour against one address and writes down what its users saw."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp

from benchmarks.calls import Call
from benchmarks.one_card.hour import BATCH_AT_ONCE, Item

LONGEST_S = 120.0  # a user who has nothing by then has gone
NO_MEMORY = 507  # what a system here answers when a load finds no memory (RFC 4918)
MODEL_HEADER = "x-model"  # of every request, so that no system has to read its body


@dataclass(slots=True)
class Seen:
    """One item as its user saw it. `useful_s`: until the first token, sound, or whole object."""

    kind: str
    at_s: float
    useful_s: float = LONGEST_S
    took_s: float = LONGEST_S
    failure: str = ""
    is_memory: bool = False

    @property
    def plain(self) -> dict[str, Any]:
        return asdict(self)


class Refused(Exception):
    """An answer that is none: its status and what it says."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"{status}: {said[:300]}")
        self.status = status


class Player:
    """`extra`: fields for the requests of the batch, in a system that has priorities. `by_name`: a
    capability has an address of its own, under its name."""

    def __init__(self, url: str, extra: dict[str, Any], by_name: bool = False) -> None:
        self._url, self._extra, self._by_name = url, extra, by_name
        self.seen: list[Seen] = []

    async def play(self, items: Sequence[Item], batch: tuple[float, list[Call]], chat: str) -> None:
        """Returns when the last request has its answer, or its user has gone. What the batch has
        not begun when the last item comes counts as failed."""
        timeout = aiohttp.ClientTimeout(total=LONGEST_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
            self._http = http
            await self._start_all(items)
            self._began_s, self._ends_s = time.monotonic(), items[-1].at_s
            async with asyncio.TaskGroup() as group:
                for item in items:
                    group.create_task(self._item(item))
                group.create_task(self._batch(*batch, chat))

    async def _start_all(self, items: Sequence[Item]) -> None:
        """Asks for each kind of item once, one after another: the hour is one of many, and begins
        with no process that starts for the first time. What it costs is not counted."""
        for item in {item.kind: item for item in items}.values():
            await self._carry(Seen(item.kind, item.at_s), item.calls)
        self.seen.clear()

    async def _item(self, item: Item) -> None:
        await asyncio.sleep(max(0.0, self._began_s + item.at_s - time.monotonic()))
        await self._carry(Seen(item.kind, item.at_s), item.calls)

    async def _batch(self, at_s: float, calls: list[Call], model: str) -> None:
        await asyncio.sleep(at_s)
        waiting = list(reversed(calls))

        async def work() -> None:
            while waiting:
                call = waiting.pop()
                if time.monotonic() - self._began_s > self._ends_s:
                    self.seen.append(Seen("batch", self._ends_s, failure="not begun in the hour"))
                    continue
                row = Seen("batch", time.monotonic() - self._began_s)
                full = Call(call.path, {**call.fields, **self._extra}, call.file)
                await self._carry(row, (("chat", model, full),))

        await asyncio.gather(*(work() for _ in range(BATCH_AT_ONCE)))

    async def _carry(self, row: Seen, calls: Sequence[tuple[str, str, Call]]) -> None:
        """Of several calls the last one's first bytes are the useful ones."""
        start_s = time.monotonic()
        self.seen.append(row)
        try:
            for capability, model, call in calls:
                prefix = f"/{capability}" if self._by_name else ""
                first_at_s = await self._ask(self._url + prefix + call.path, model, call)
            row.useful_s, row.took_s = first_at_s - start_s, time.monotonic() - start_s
        except Refused as error:
            row.failure, row.is_memory = str(error), error.status == NO_MEMORY
        except (aiohttp.ClientError, TimeoutError) as error:
            row.failure = repr(error)

    async def _ask(self, url: str, model: str, call: Call) -> float:
        """When the first useful byte was there. Raises Refused, aiohttp.ClientError."""
        body, kind = call.body(model)
        base = model.partition(":")[0]
        headers = {"content-type": kind, MODEL_HEADER: base, "serve_multiplexed_model_id": base}
        async with self._http.post(url, data=body, headers=headers) as answer:
            if answer.status != 200:
                raise Refused(answer.status, await answer.text())
            if call.fields.get("stream"):
                return await _first_word(answer)
            first_at_s = 0.0
            async for _ in answer.content.iter_any():
                first_at_s = first_at_s or time.monotonic()
        if not first_at_s:
            raise Refused(200, "an empty answer")
        return first_at_s if call.path == "/v1/audio/speech" else time.monotonic()


async def _first_word(answer: aiohttp.ClientResponse) -> float:
    """Reads a streamed answer to its end. Raises Refused."""
    first_at_s = 0.0
    async for line in answer.content:
        if not line.startswith(b"data: {"):
            continue
        said = json.loads(line[6:])
        if "error" in said:
            raise Refused(200, str(said["error"]))
        if any(choice["delta"].get("content") for choice in said["choices"]):
            first_at_s = first_at_s or time.monotonic()
    if not first_at_s:
        raise Refused(200, "an answer without a word")
    return first_at_s
