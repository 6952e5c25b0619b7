"""Adapters in an engine of vLLM: from the name in a request to a slot in the batch.

Each request takes three steps, and fails alone at any of them, with the reason: the service finds
its adapter in the catalogue, copies and checks it, before vLLM sees the request; the request waits
for a place in the batch (deployments.engines.vllm.batching.batch_gate); vLLM loads the adapter by
`add_lora`, whose failure harms no other request. Only then does the request reach vLLM's
`generate`, where a bad adapter would end the engine for all (`EngineDeadError` for every request,
seen with vLLM 0.32).
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from arbiter.errors import RequestError
from deployments.adapters.catalogue import CatalogueEntry
from deployments.adapters.safe_files import AdapterInvalid
from deployments.adapters.store import CheckedAdapters, EngineCatalogue
from deployments.engines import asgi
from deployments.engines.asgi import BadField
from deployments.engines.protocol import Config, Receive, Scope, Send
from deployments.engines.vllm.adapters.adapter_images import COLD, HOT
from deployments.engines.vllm.adapters.adapter_mover import AdapterMover
from deployments.engines.vllm.batching import callers
from deployments.engines.vllm.batching.batch_admission import BASE, WaitingRequest
from deployments.engines.vllm.batching.batch_gate import BatchGate
from deployments.engines.vllm.batching.picture_turns import end_turn

REBALANCE_S = 60.0  # F3, where the configuration says nothing


@dataclass(slots=True)
class AdapterRequest:
    """One HTTP request for an adapter."""

    model: str  # as the client wrote it
    lora: LoRARequest
    entry: CatalogueEntry


_ASKED: ContextVar[AdapterRequest | None] = ContextVar("asked", default=None)
# What is called once the core has ended with the request that `generate` adds next in this context.
_ON_FINISH: ContextVar[Callable[[], None] | None] = ContextVar("on_finish", default=None)


class AdmittingLLM(AsyncLLM):
    """vLLM's frontend, whose `generate`, where every route ends, first waits for a place in the
    batch and for the adapter's load. The core orders its steps by the same priority
    (deployments.engines.vllm.batching.batch_hold)."""

    gate: BatchGate
    served_name: str
    adapters: "AdapterService | None" = None

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        **more: Any,
    ) -> AsyncGenerator[Any, None]:
        end_turn()
        count = callers.AnswerTokens(sampling_params)
        more["priority"] = callers.current().priority  # whatever the body says
        async with self._place_in_batch(lora_request, callers.prompt_tokens(prompt)) as place:
            generated = super().generate(
                prompt, sampling_params, request_id, lora_request=lora_request, **more
            )
            # The place is free once the core has ended, whether or not the client reads.
            _ON_FINISH.set(partial(self._leave_batch, place))
            async with aclosing(generated) as outputs:
                async for output in outputs:
                    if sampling_params.structured_outputs is not None:
                        _check_followed(output)
                    self.gate.answered(place, count.added(output))
                    yield output

    async def add_request(self, *args: Any, **more: Any) -> RequestOutputCollector:
        """Adds the request that `generate` has a place for, or another one, and has that place be
        left once the core has all of the answer."""
        on_finish = _ON_FINISH.get()
        _ON_FINISH.set(None)
        collector = await super().add_request(*args, **more)
        if on_finish is not None:
            _note_finish(collector, on_finish)
        return collector

    def _leave_batch(self, place: WaitingRequest) -> None:
        self.gate.leave(place)
        if self.adapters is not None:
            self.adapters.after_request()

    @asynccontextmanager
    async def _place_in_batch(
        self, lora: LoRARequest | None, tokens: int
    ) -> AsyncIterator[WaitingRequest]:
        """Holds the place of one request in the batch, with its adapter in a slot. Raises
        AdaptersBusy, RequestExpired, QueueFull, AdapterInvalid, EngineDeadError."""
        name = _asked_name() or self.served_name
        adapter = lora.lora_name if lora and self.adapters else BASE  # else vLLM has the slots
        if self.adapters is not None and lora is not None:
            self.adapters.mover.ahead(lora)
        try:
            async with callers.place(self.gate, adapter, name, tokens) as place:
                if self.adapters is not None and lora is not None:
                    await self.adapters.slotted(lora, name)
                    self.gate.check_deadline(place, name)
                yield place
        except RequestError as error:
            raise callers.note_refusal(error) from None
        finally:
            if self.adapters is not None:
                self.adapters.after_request()


def _note_finish(collector: RequestOutputCollector, on_finish: Callable[[], None]) -> None:
    """Has `on_finish` called when vLLM puts the last output of a request into its collector, which
    joins the outputs that are not taken. It is called by the loop, because an error in vLLM's own
    task would end the engine."""
    put, loop = collector.put, asyncio.get_running_loop()

    def look(output: Any) -> None:
        if isinstance(output, Exception) or output.finished:
            loop.call_soon(on_finish)

    def put_and_look(output: Any) -> None:
        put(output)
        look(output)

    collector.put = put_and_look
    if collector.output is not None:  # it came before this
        look(collector.output)


def _check_followed(output: Any) -> None:
    """Raises BadField where the core gave a request up: its schema or grammar passed vLLM's checks
    and cannot be compiled, or has no text. vLLM would answer 500."""
    if any(choice.finish_reason == "error" for choice in output.outputs):
        raise BadField(
            "response_format",
            "the engine can write nothing that follows the schema or grammar of this request",
        )


class AdapterService:
    """The adapters of one engine: which request uses which, and when it may enter the batch."""

    def __init__(self, config: Config, gate: BatchGate) -> None:
        """`config["adapters"]`: what the load plan made. Raises OSError, BadHeader."""
        section = config["adapters"]
        self.served_name = str(config.get("served_name", config["model"]))
        self.llm: AsyncLLM | None = None
        self.gate = gate
        self._catalogue = EngineCatalogue(config)
        self._checked = CheckedAdapters.of(config)
        self._numbers: dict[str, int] = {}  # digest to vLLM's number for it
        self._loads: dict[str, asyncio.Task[str]] = {}  # of adapters that run
        self._names: dict[str, str] = {}  # digest to name, as it was asked for last
        self.mover = AdapterMover(self.gate)
        self._rebalance_s = float(section.get("rebalance_s", REBALANCE_S))
        self.rebalancing: asyncio.Task[None] | None = None  # runs as long as the engine
        self._pins: dict[str, CatalogueEntry] = {}  # by digest
        self._leaving: set[str] = set()  # digests of removed tenants, which leave once unused
        self._leaver: asyncio.Task[None] | None = None

    # -- the catalogue -------------------------------------------------------------------------

    async def asked(self, body: bytes, tenant: str) -> AdapterRequest | None:
        """The adapter that a request names, or None when it means the base or an unknown model,
        which vLLM refuses itself. Raises AdapterInvalid, AdapterAmbiguous, AdaptersAway."""
        try:
            model = json.loads(body).get("model")
        except (ValueError, RecursionError, AttributeError):
            return None
        if not isinstance(model, str) or model == self.served_name:
            return None
        entry = await self._catalogue.find(model, tenant)
        if entry is None:
            return None
        await self._unpin_stale()
        published = await self._checked.take(entry)
        self._names[published.digest] = entry.full_name
        self.mover.owners[published.digest] = entry.tenant
        number = self._numbers.setdefault(published.digest, len(self._numbers) + 1)
        return AdapterRequest(
            model, LoRARequest(published.digest, number, str(published.path)), entry
        )

    # -- a slot --------------------------------------------------------------------------------

    async def slotted(self, lora: LoRARequest, name: str) -> None:
        """Returns once the adapter of a request that has a place in the batch has a slot. Raises
        AdapterInvalid, EngineDeadError."""
        await self._loaded(lora, name)
        await self._pin(_ASKED.get())

    async def _loaded(self, lora: LoRARequest, name: str) -> None:
        """Returns once vLLM has the adapter in its host cache and in a slot. All requests that run
        at a time share one load: while any of them runs, the adapter keeps its slot; after the
        last, vLLM may drop it."""
        task = self._loads.get(lora.lora_name)
        is_first = task is None
        if task is None:
            task = self._loads[lora.lora_name] = asyncio.ensure_future(self.mover.bring(lora))
        await asyncio.wait({task})
        if isinstance(error := task.exception(), EngineDeadError):
            raise error
        if error:
            raise AdapterInvalid(name, f"vLLM: {error}") from error
        if not callers.current().is_prewarm:
            self.mover.used(lora, task.result() if is_first else HOT)

    def after_request(self) -> None:
        self._forget_idle_loads()
        if self._leaving - self.gate.running.keys() and (not self._leaver or self._leaver.done()):
            self._leaver = asyncio.ensure_future(self._let_leave())

    def _forget_idle_loads(self) -> None:
        for name in self._loads.keys() - self.gate.running.keys():
            del self._loads[name]

    async def _pin(self, adapter: AdapterRequest | None) -> None:
        """A pinned adapter keeps its slot from its first use on, while its entry says so. At least
        one slot stays for the adapters that are not pinned; a pin beyond that has no effect."""
        assert self.llm is not None
        if adapter is None or not adapter.entry.pin or adapter.lora.lora_name in self._pins:
            return
        if len(self._pins) < self.gate.slots - 1:
            self._pins[adapter.lora.lora_name] = adapter.entry
            self.gate.pinned = frozenset(self._pins)
            await self.llm.pin_lora(adapter.lora.lora_int_id)

    async def _unpin_stale(self) -> None:
        """Unpins the adapters whose entries in the catalogue have changed or gone. Called before a
        request has a place in the batch: where the file server of the catalogue hangs, the request
        would keep its place from others."""
        for digest in await self._catalogue.outdated(self._pins):
            if digest not in self.gate.running:
                await self._unpin(digest)

    async def _unpin(self, digest: str) -> None:
        """Drops the adapter from vLLM, which has no other way to unpin it."""
        assert self.llm is not None
        if self._pins.pop(digest, None) is None:
            return  # another request has unpinned it meanwhile
        self.gate.pinned = frozenset(self._pins)
        await self.llm.remove_lora(self._numbers[digest])

    async def forget_tenant(self, tenant: str) -> None:
        """Empties the slots of a removed tenant's own adapters; an adapter in use leaves its slot
        at the end of its last request (E6)."""
        self._leaving |= self.mover.forget_tenant(tenant)
        await self._let_leave()

    async def _let_leave(self) -> None:
        while idle := self._leaving - self.gate.running.keys():
            digest = idle.pop()
            self._leaving.discard(digest)
            self._names.pop(digest, None)
            self.mover.forget_adapter(digest)
            if digest in self._pins:
                await self._unpin(digest)
            elif self.llm is not None:
                await self.llm.remove_lora(self._numbers[digest])
        await self.mover.report()

    async def forget_loaded(self) -> None:
        """Drops all adapters before a sleep, because what vLLM keeps of them on the host is private
        memory too. The next request for an adapter loads it again from its copy."""
        assert self.llm is not None
        await self.mover.forget()
        self._pins.clear()
        self.gate.pinned = frozenset()
        for number in await self.llm.list_loras():
            await self.llm.remove_lora(number)

    # -- what is shown -------------------------------------------------------------------------

    async def tell_tiers(self, receive: Receive, send: Send) -> None:
        """Answers messages.ADAPTERS: the tiers of the names that this tenant may see, and of all
        that are hot."""
        raw = await asgi.read_body(receive)
        if raw is None:
            return
        await self.mover.look()
        hot = (self._names[digest] for digest in self.mover.hot if digest in self._names)
        names = {*asgi.json_object(raw)["names"], *hot}
        entries = await self._catalogue.entries(names, callers.current().tenant)
        published = await self._checked.peek(entries)
        tiers = dict.fromkeys((entry.full_name for entry in entries), COLD)
        tiers |= {name: self.mover.tier(one.digest) for name, one in published.items()}
        await asgi.respond(send, 200, {"tiers": tiers})

    # -- in front of vLLM's application --------------------------------------------------------

    async def serve(self, api: Any, scope: Scope, receive: Receive, send: Send) -> None:
        body = await asgi.read_body(receive)
        if body is None:
            return
        try:
            adapter = await self.asked(body, callers.current().tenant)
        except RequestError as error:
            return await asgi.refuse_request(send, error)
        _ASKED.set(adapter)
        await api(scope, asgi.replay(body, receive), send)

    def adopt(self, llm: AsyncLLM, state: Any) -> None:
        """Lets vLLM's routes resolve a model's name through the request that has it."""
        self.llm = self.mover.llm = llm
        self.rebalancing = asyncio.ensure_future(self.mover.run(self._rebalance_s))
        models = state.openai_serving_models
        models.lora_requests = _AskedAdapters()
        plain_name = models.model_name
        models.model_name = lambda lora=None: _asked_name() or plain_name()

    async def facts(self) -> dict[str, Any]:
        await self.mover.look()
        running = {k or self.served_name: n for k, n in self.gate.running.items()}
        pinned = sorted(entry.full_name for entry in self._pins.values())
        return {
            "slots": self.gate.slots,
            "running": running,
            "waiting": self.gate.waiting,
            "expired": self.gate.expired,
            "pinned": pinned,
            "tiers": self.mover.facts(self._names, await self._catalogue.names()),
        }


def _asked_name() -> str:
    adapter = _ASKED.get()
    return adapter.model if adapter else ""


class _AskedAdapters(dict[str, LoRARequest]):
    """Stands where vLLM keeps all adapters by name, and knows only the adapter of this request."""

    def __contains__(self, name: object) -> bool:
        adapter = _ASKED.get()
        return adapter is not None and adapter.model == name

    def __getitem__(self, name: str) -> LoRARequest:
        adapter = _ASKED.get()
        if adapter is None or adapter.model != name:
            raise KeyError(name)
        return adapter.lora
