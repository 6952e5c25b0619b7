"""AsyncClient: the calls of AsyncCalls, and with them leases, uses, events and state.

async with AsyncClient() as client:
    answer = await client.chat("What is a ticket?", model="small-chat")
    async for delta in client.stream_chat("And a lease?", model="small-chat"):
        print(delta, end="")
"""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Literal, ParamSpec, Self, TypeVar, Unpack
from urllib.parse import quote

from arbiter import leases
from arbiter.errors import RequestError, TicketClosed
from arbiter.units import TicketId
from deployments.client import arbiter_rows, batches, jobs
from deployments.client.calls import AsyncCalls, Budget
from deployments.client.connection import Connection, Request
from deployments.client.fields import Fields, Json
from deployments.client.typed_errors import FrontUnreachable
from deployments.config.environment import Environment
from deployments.messages import ACQUIRE, ACQUIRE_S

P = ParamSpec("P")
T = TypeVar("T")

WITHIN_S = 600.0  # one answer: OpenAI's own bound, and the longest generation
AGAIN_S, AWAY_S = 0.5, 30.0  # a front starts in two seconds; fifteen times that is an outage


class AsyncClient(AsyncCalls):
    """One per program; `async with`, or `close`."""

    def __init__(
        self,
        url: str | None = None,
        *,
        key: str | None = None,
        handle: Any = None,
        model: str | None = None,
        timeout_s: float = WITHIN_S,
    ) -> None:
        """Calls the front over HTTP at `url`, or by the `handle` of its deployment. Without either:
        at `ARBITER_URL` if that is set; else by handle, where this process is connected to Ray, as
        a driver and every deployment are; else at port 8000 of this machine. `key`: else
        `ARBITER_KEY`. `model`: of the calls that name none. `timeout_s`: between two pieces of an
        answer."""
        environment = Environment()
        key_of_environment = environment.key.get_secret_value() if environment.key else ""
        token = key_of_environment if key is None else key
        if handle is None and url is None and _is_inside():
            from deployments.client.handle import front_handle

            handle = front_handle()
        if handle is not None:
            connection = Connection.by_handle(handle, token, timeout_s)
        else:
            where = (url or environment.url).rstrip("/")
            connection = Connection.over_http(where, token, timeout_s)
        super().__init__(connection, model)

    async def close(self) -> None:
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- models and memory -----------------------------------------------------------------------

    @asynccontextmanager
    async def acquire(
        self, model: str | None = None, *, term_s: float = ACQUIRE_S, **fields: Unpack[Fields]
    ) -> AsyncGenerator["AsyncHeld"]:
        """Holds a model for several calls: it is in use until the block ends, so no other model
        takes its place between them. It ends after `term_s` seconds at the latest, of which 600
        are the most (ACQUIRE_S). Raises RequestError."""
        request, name = await self._request(ACQUIRE, model, fields, {"term_s": term_s}, None)
        held = AsyncHeld(self._connection, name, self._budget)
        try:
            await held.begin(request)
            yield held
        finally:
            await held.release()

    @asynccontextmanager
    async def lease(
        self, gb: float, *, within_s: float | None = None, **how: Any
    ) -> AsyncGenerator[leases.Lease]:
        """Leases `gb` GiB of device memory for this process itself; `how` as for
        arbiter.leases.ask. A thread sends its heartbeats, so that a busy event loop does not lose
        it. Needs a key of scope `lease`. Raises LeaseRefused, QuotaExceeded, NeverFits,
        DeadlineUnmet, LeaseLost, ArbiterUnavailable."""
        held = self._lease(gb, how)
        try:
            yield await asyncio.to_thread(held.acquire, within_s)
        finally:
            await asyncio.to_thread(held.release)

    def _lease(self, gb: float, how: dict[str, Any]) -> leases.Lease:
        way = self._connection.lease_way()
        return leases.ask(gb, **{"pid": os.getpid(), "way": way, **how})

    # -- work that waits -------------------------------------------------------------------------

    async def submit(
        self, call: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> jobs.AsyncJob[T]:
        """Hands a call of this client to the front, as `submit(client.chat, "Hello")`, and returns
        at once. The front makes the call when there is room, with priority batch unless
        `x_priority` says otherwise, and the job survives every process of the system. Streams
        cannot be submitted. Raises RequestError for what is wrong with the request; TypeError where
        `call` is no method of a client."""
        return await jobs.submit(call, *args, **kwargs)

    def job(self, job_id: str) -> jobs.AsyncJob[Json | bytes]:
        """A job that was submitted before, here or elsewhere. Its result is the fields of the
        answer's JSON, or its bytes."""
        return jobs.job_by_id(self._connection, job_id)

    async def line(
        self, custom_id: str, call: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> batches.Line[T]:
        """A call of this client as a line of a batch; nothing is sent. Raises BadRequest."""
        unsent = await jobs.withheld(call, *args, **kwargs)
        return batches.Line.of(custom_id, unsent.request, unsent.read)

    async def submit_batch(
        self,
        lines: Sequence[batches.Line[T]],
        *,
        completion_window: str = "24h",
        metadata: Mapping[str, str] | None = None,
    ) -> batches.AsyncBatch[T]:
        """Hands in a batch of lines and returns at once. All lines have one path; their models may
        differ. Raises RequestError: BadRequest; QuotaExceeded where too much waits."""
        return await batches.submit_batch(self._connection, lines, completion_window, metadata)

    def batch(self, batch_id: str) -> batches.AsyncBatch[Json]:
        """A batch that was submitted before, here or elsewhere. Its answers are the fields of their
        JSON."""
        return batches.AsyncBatch(self._connection, batch_id)

    # -- what there is ---------------------------------------------------------------------------

    async def models(self) -> tuple[str, ...]:
        """The names that this key may ask for, adapters among them."""
        reply = await self._connection.read(Request("GET", "/v1/models"))
        return tuple(row["id"] for row in reply["data"])

    async def status(self) -> arbiter_rows.Status:
        """Devices, tickets and the queue, now."""
        return arbiter_rows.status(await self._connection.read(Request("GET", "/arbiter/state")))

    async def residency(self) -> dict[str, arbiter_rows.ModelResidency]:
        """Where each model is, its floor, its host copy and its load in flight, by its name."""
        reply = await self._connection.read(Request("GET", "/arbiter/residency"))
        return arbiter_rows.residency(reply)

    async def set_floor(self, model: str, floor: Literal["device", "host", "cold"]) -> None:
        """Sets the lowest level to which a model may go: `device` loads it now and keeps it, `host`
        keeps it asleep at least, `cold` lets it go. Survives restarts. Needs a key of scope
        `admin`. Raises UnknownModel."""
        body: Json = {"floor": floor}
        await self._connection.read(Request("PUT", f"/arbiter/residency/{quote(model)}", json=body))

    async def load(self, model: str) -> None:
        """Begins to load a model without a request, and does not wait for it. Needs a key of scope
        `admin`. Raises UnknownModel, NotResident, OutsideHours."""
        await self._connection.read(Request("POST", f"/arbiter/models/load/{quote(model)}"))

    async def unload(self, model: str) -> tuple[str, ...]:
        """Unloads a model where it is idle. Returns its tickets, of which those in use stay. Needs
        a key of scope `admin`. Raises UnknownModel."""
        reply = await self._connection.read(
            Request("POST", f"/arbiter/models/unload/{quote(model)}")
        )
        return tuple(reply["tickets"])

    async def host_copies(self) -> tuple[arbiter_rows.HostCopy, ...]:
        """Copies of models' files in host RAM, which the engines of a node share."""
        reply = await self._connection.read(Request("GET", "/arbiter/host_copies"))
        return tuple(arbiter_rows.host_copy(row) for row in reply["copies"])

    async def drop_host_copy(self, key: str) -> bool:
        """Drops the copy with this key on every node. Returns False where an engine has it open,
        with the last of which it leaves. Needs a key of scope `admin`. Raises UnknownHostCopy."""
        reply = await self._connection.read(Request("DELETE", f"/arbiter/host_copies/{quote(key)}"))
        return bool(reply["is_gone"])

    async def plan(
        self,
        model: str | None = None,
        *,
        gb: float | None = None,
        priority: Literal["urgent", "high", "normal", "low", "batch"] = "normal",
        node: str | None = None,
    ) -> arbiter_rows.Plan:
        """What a request for a model, or so many GiB for something else, would bring about. It
        changes nothing."""
        name = model or self._default_model or ""
        body: Json = {"model": name, "gb": gb, "priority": priority, "node": node}
        reply = await self._connection.read(Request("POST", "/arbiter/plan", json=body))
        return arbiter_rows.plan(reply)

    async def subscribe(self, after: int | None = None) -> AsyncGenerator[arbiter_rows.Event]:
        """Yields the events after the sequence number `after`, or from now on, as they happen,
        until the caller stops. After a break of the connection, as where the front restarts, it
        continues where it was. Raises RequestError, and what says why when no front has answered
        for half a minute, as FrontUnreachable."""
        last = (await self.status()).sequence if after is None else after
        answered_s = time.monotonic()

        def note_answer() -> None:
            nonlocal answered_s
            answered_s = time.monotonic()

        while True:
            request = Request("GET", f"/arbiter/events?after={last}")
            try:
                async with aclosing(self._connection.events(request, note_answer)) as events:
                    async for row in events:
                        last = row["seq"]
                        yield arbiter_rows.event(row)
            except RequestError as error:  # while a front starts, Serve's proxy answers with 503
                if error.status_code < 500 or time.monotonic() - answered_s > AWAY_S:
                    raise
            await asyncio.sleep(AGAIN_S)


class AsyncHeld(AsyncCalls):
    """A model that is in use for its client until `release`: the calls, without its name."""

    def __init__(self, connection: Connection, model: str, budget: Budget | None) -> None:
        super().__init__(connection, model, budget)
        self.model, self.ticket = model, TicketId("")
        self._following: asyncio.Task[None] | None = None

    async def begin(self, request: Request) -> None:
        """Waits until the model serves. Raises RequestError."""
        begun: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._following = asyncio.create_task(self._follow(request, begun))
        both: set[asyncio.Future[Any]] = {self._following, begun}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not begun.done():
            begun.cancel()
            await self._following  # raises what it was refused with
            raise TicketClosed(self.model)
        self.ticket = TicketId(begun.result())

    async def _follow(self, request: Request, begun: "asyncio.Future[str]") -> None:
        """Reads the stream of the use and returns at its end. A break of the connection ends the
        use, too."""
        try:
            async with aclosing(self._connection.events(request)) as events:
                async for event in events:
                    if not begun.done():
                        begun.set_result(event["ticket"])
        except FrontUnreachable:
            if not begun.done():
                raise

    @property
    def has_ended(self) -> bool:
        """True once it was released, its term is over, or the arbiter took the model back."""
        return self._following is None or self._following.done()

    async def release(self) -> None:
        """Idempotent; calls after it raise TicketClosed."""
        following = self._following
        if following is not None:
            following.cancel()
            await asyncio.wait({following})

    async def _request(self, *request: Any) -> tuple[Request, str]:
        if self.has_ended:
            raise TicketClosed(self.ticket or self.model)
        return await super()._request(*request)


def _is_inside() -> bool:
    """Whether this process is connected to Ray, and no variable names a front at another place."""
    return "ARBITER_URL" not in os.environ and leases.is_in_ray()
