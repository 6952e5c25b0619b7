"""How a request uses KV: the key under which its blocks are found again, and how long they stay.
Pure.

The key chooses the replica (deployments.routing), so that requests of one key meet the blocks of
those before them. All blocks that a request uses are one group: they stay for the term that it asks
for, and leave together, the last one first. No key opens anything: vLLM's hash of a block covers
the tokens before it, the adapter and the tenant's salt, and a slab the weights and the layout.
"""

from hashlib import blake2b
from typing import get_args

from deployments.config.fields import KvTerm
from deployments.config.schema import CapabilityConfig, ModelConfig
from deployments.front.schemas import Body, Generates
from deployments.front.stable_prefix import StableRun

TERMS: tuple[KvTerm, ...] = get_args(KvTerm)  # the shortest first
USUAL: KvTerm = "long"  # of an engine that is told nothing
# OpenAI's words: `in_memory` lasts for five to ten minutes without use there, `24h` for a day.
RETENTIONS: dict[str, KvTerm] = {"in_memory": "short", "in-memory": "short", "24h": "extended"}
_DIGEST_BYTES = 16
_KEEPS = "vllm"  # the engine whose KV lies in slabs


def key_of(checked: Body, run: StableRun | None) -> str:
    """The strongest key of a request (SPEC G2): its conversation, its longest stable run, the
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


def term_of(checked: Body, usual: KvTerm, longest: KvTerm) -> KvTerm:
    """For how long its KV stays after the request (SPEC G4): as the request says, our own field
    first, else `usual`; never longer than `longest`, which is the tenant's."""
    asked = checked.x_kv_term
    if asked is None and isinstance(checked, Generates) and checked.prompt_cache_retention:
        asked = RETENTIONS[checked.prompt_cache_retention]
    return min(asked or usual, longest, key=TERMS.index)


def keeps_kv(capability: CapabilityConfig, model: ModelConfig) -> bool:
    """Whether the KV of a model outlives its engine, so that a term means anything to it."""
    return model.keep_kv and capability.engine == _KEEPS
