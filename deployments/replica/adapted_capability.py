"""A capability whose models may have LoRA adapters: those behind URLs are fetched by its replica.

Engines open no connection, so the replica fetches (deployments.adapters.fetch) before the engine is
asked; the engine copies, hashes and checks what came like any adapter of a folder.
"""

from pathlib import Path
from typing import Any

from arbiter.errors import TicketClosed
from deployments import messages
from deployments.adapters.catalogue import FETCHED
from deployments.adapters.fetch import Fetcher, FetchFailed
from deployments.adapters.store import EngineCatalogue, store_of
from deployments.adapters.validate import rules_of
from deployments.config import safetensors_header
from deployments.config.file_threads import in_thread
from deployments.replica.capability import Capability
from deployments.replica.held_model import HolderState
from deployments.replica.merging import Merging
from deployments.replica.use import Use, read_response


class AdaptedCapability(Capability):
    """Tells the router which adapters were used here, and brings those that a call names."""

    def __init__(self, capability: str) -> None:
        super().__init__(capability)
        self._fetchers: dict[
            str, tuple[str, AdapterFetcher]
        ] = {}  # by model, with the ticket of its engine
        self._merging: dict[str, Merging] = {}  # by model; of those that may merge an adapter
        self._residency.on_tenant_removed = self._forget_tenant

    def _forget_tenant(self, tenant: str) -> None:
        for merging in self._merging.values():
            merging.forget_tenant(tenant)

    async def _answer_without_model(
        self, call: messages.InferenceCall
    ) -> messages.FullResponse | None:
        """Says too in which tiers adapters are. Raises EngineLost."""
        if call.path != messages.ADAPTERS:
            return await super()._answer_without_model(call)
        held = self._residency.models.get(call.model)
        if held is None or held.link is None or held.state is not HolderState.RESIDENT:
            return messages.FullResponse(*messages.refusal(TicketClosed(call.model)))
        head, body = await read_response(
            held.link.stream("POST", call.path, call.headers, call.body)
        )
        return messages.FullResponse(head, body)

    async def served_by(self, call: messages.InferenceCall) -> str:
        """Returns the copy into which the call's adapter was merged, while there is one. Raises
        AdaptersAway."""
        merging = self._merging.get(call.model)
        if merging is None or call.path == messages.ACQUIRE:
            return call.model
        return await merging.served_by(call.served or call.model, call.tenant)

    async def prepare(self, call: messages.InferenceCall, use: Use) -> None:
        """Fetches the call's adapter to this node, where it lies behind a URL. Raises RequestError,
        also where the files that say what is to be fetched cannot be read."""
        config = use.config
        if call.served in ("", call.model) or "adapters" not in config:
            return
        self.adapter_slots.note(use.ticket, call.served, config["adapters"]["slots"])
        try:
            await self._bring(call, use, config)
        except (OSError, safetensors_header.BadHeader) as error:
            raise FetchFailed(call.served, f"{error}; see whether these files are whole") from error

    async def _bring(self, call: messages.InferenceCall, use: Use, config: dict[str, Any]) -> None:
        """Raises RequestError, OSError, safetensors_header.BadHeader."""
        if not self._has_fetcher(call.model, use):
            made = await in_thread(config["model"], AdapterFetcher, config)
            if not self._has_fetcher(call.model, use):  # no other call was first meanwhile
                self._fetchers[call.model] = use.ticket, made
                self._follow(call.model, config)
        await self._fetchers[call.model][1].bring(call.served, call.tenant)

    def _has_fetcher(self, model: str, use: Use) -> bool:
        """Whether there is a fetcher for the model's present engine: a new one may have another
        configuration."""
        return model in self._fetchers and self._fetchers[model][0] == use.ticket

    def _follow(self, model: str, config: dict[str, Any]) -> None:
        """Replaces the merging of a model whose settings have changed. A merged copy outlives the
        model's engine, which may be idle beside it, but not the settings under which it was
        made."""
        merging = self._merging.get(model)
        if merging is not None and merging.config == config:
            return
        if merging is not None:
            self._merging.pop(model).end()
        if "merge" in config["adapters"]:
            self._merging[model] = Merging(self._residency, model, config)


class AdapterFetcher:
    """Fetches adapters of one engine for its replica."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Reads the model's files. Raises OSError, safetensors_header.BadHeader."""
        self._rules = rules_of(config)
        self._catalogue = EngineCatalogue(config)
        self._store = store_of(config)
        self._fetcher = Fetcher(Path(config["adapters"]["store"]) / FETCHED, self._rules.bounds)

    async def bring(self, name: str, tenant: str) -> None:
        """Raises AdapterInvalid, AdaptersAway, FetchFailed. The engine refuses names that no
        catalogue has."""
        entry = await self._catalogue.find(name, tenant)
        if entry is None or not entry.url:
            return
        if not entry.path.is_dir():
            published = self._store.peek(entry, self._rules)
            if published is not None and published.path.is_dir():
                return  # what was fetched has left, and the engine serves its checked copy
        await self._fetcher.bring(entry)
