"""How a request uses KV: the key under which its blocks are found again, and how long they stay.
Pure.

The key chooses the replica (deployments.routing), so that requests of one key meet the blocks of
those before them. It keeps their term, too: all blocks that a request uses are one group, stay for
the term that a request of the key asked for last, and leave together, the last one first. No key
opens anything: vLLM's hash of a block covers the tokens before it, the adapter and the tenant's
salt, and a slab's namespace the weights and the layout.
"""

from collections import OrderedDict
from hashlib import blake2b
from typing import get_args

from deployments.config.capability_section import CapabilityConfig
from deployments.config.fields import KvTerm
from deployments.config.model_section import ModelConfig
from deployments.front.inference.schemas import Body, Generates
from deployments.front.inference.stable_prefix import StableRun
from deployments.routing.rank import KEYS

TERMS: tuple[KvTerm, ...] = get_args(KvTerm)  # the shortest first
# OpenAI's words: `in_memory` lasts for five to ten minutes without use there, `24h` for a day.
RETENTIONS: dict[str, KvTerm] = {"in_memory": "short", "in-memory": "short", "24h": "extended"}
_DIGEST_BYTES = 16
_KV_ENGINE = "vllm"  # the engine whose KV lies in slabs


def key_of(checked: Body, run: StableRun | None) -> str:
    """The strongest key of a request (G2): its conversation, its longest stable run, the
    prefix that it names, OpenAI's `prompt_cache_key`. Empty: it has none. `run`: as marked."""
    if checked.x_conversation_id:
        return f"conv:{checked.x_conversation_id}"
    if not isinstance(checked, Generates):
        return ""
    if run and run.canonical:
        return f"seg:{blake2b(run.canonical, digest_size=_DIGEST_BYTES).hexdigest()}"
    if checked.x_prefix_id:
        return f"pfx:{checked.x_prefix_id}"
    return f"v5:{checked.prompt_cache_key}" if checked.prompt_cache_key else ""


def requested_term(checked: Body) -> KvTerm | None:
    """The term for which a request asks that its KV stays after it: by `x_kv_term`, else by
    OpenAI's `prompt_cache_retention`; None: it does not say."""
    if checked.x_kv_term is not None or not isinstance(checked, Generates):
        return checked.x_kv_term
    retention = checked.prompt_cache_retention
    return RETENTIONS[retention] if retention else None


def allowed_term(requested: KvTerm | None, default: KvTerm, longest: KvTerm) -> KvTerm:
    """The term for which the KV of a request stays after it (G4). `default`: its model's, where it
    requests none; `longest`: its tenant's."""
    return min(requested or default, longest, key=TERMS.index)


class KeyTerms:
    """The term that requests of each key asked for last, so that one word is enough for a whole
    conversation; KEYS of them, the least recently used forgotten."""

    def __init__(self) -> None:
        self._terms: OrderedDict[tuple[str, str, str], KvTerm] = OrderedDict()

    def resolve(
        self, tenant: str, served: str, key: str, requested: KvTerm | None
    ) -> KvTerm | None:
        """Returns the term that a request asks for, and remembers it for the key; else what the key
        asked for last. `served`: the model or adapter. `key`: empty where the request has none."""
        owner = tenant, served, key
        term = requested or self._terms.get(owner)
        if key and term:
            self._terms[owner] = term
            self._terms.move_to_end(owner)
            if len(self._terms) > KEYS:
                self._terms.popitem(last=False)
        return term


def keeps_kv(capability: CapabilityConfig, model: ModelConfig) -> bool:
    """Whether the KV of a model outlives its engine, so that a term means anything to it."""
    return model.keep_kv and capability.engine == _KV_ENGINE
