"""The key and the term of a request's KV, by its fields."""

from typing import Any

import pytest

from deployments.config.schema import parse_table
from deployments.front.inference.kv_use import (
    KeyTerms,
    allowed_term,
    keeps_kv,
    key_of,
    requested_term,
)
from deployments.front.inference.schemas import Chat, Embeddings
from deployments.front.inference.stable_prefix import stable_run
from deployments.routing.rank import KEYS

SYSTEM = {"role": "system", "content": "Be brief.", "stable": True}
HELLO = {"role": "user", "content": "Hello"}
ALL = {
    "x_conversation_id": "c-1",
    "messages": [SYSTEM, HELLO],
    "x_prefix_id": "manual-7",
    "prompt_cache_key": "team a",
}


def key(**fields: Any) -> str:
    said = {"model": "m", "messages": [HELLO], **fields}
    return key_of(Chat.model_validate(said), stable_run(said))


@pytest.mark.spec("G2")
def test_strongest_key_that_a_request_has_is_its_key() -> None:
    left = dict(ALL)
    found = [key(**left)]
    for name in ALL:
        del left[name]
        found.append(key(**left))
    conversation, segment, prefix, given, none = found
    assert (conversation, prefix, given, none) == ("conv:c-1", "pfx:manual-7", "v5:team a", "")
    assert segment.startswith("seg:") and len(segment) == len("seg:") + 32


@pytest.mark.spec("G2")
def test_requests_with_one_stable_run_have_one_key_whatever_follows() -> None:
    other = {**HELLO, "content": "Good bye"}
    assert key(messages=[SYSTEM, HELLO]) == key(messages=[SYSTEM, other], temperature=0.5)
    changed = {**SYSTEM, "content": "Be exact."}
    assert key(messages=[SYSTEM, HELLO]) != key(messages=[changed, HELLO])


@pytest.mark.spec("G2")
def test_request_that_generates_no_text_has_the_key_of_its_conversation_alone() -> None:
    said = {"model": "m", "input": "x", "x_prefix_id": "p", "prompt_cache_key": "k"}
    assert key_of(Embeddings.model_validate(said), None) == ""
    said["x_conversation_id"] = "c-1"
    assert key_of(Embeddings.model_validate(said), None) == "conv:c-1"


@pytest.mark.spec("G4")
@pytest.mark.parametrize(
    ("said", "term"),
    [
        ({}, None),
        ({"prompt_cache_retention": "in_memory"}, "short"),
        ({"prompt_cache_retention": "in-memory"}, "short"),
        ({"prompt_cache_retention": "24h"}, "extended"),
        ({"x_kv_term": "short"}, "short"),
        ({"x_kv_term": "long", "prompt_cache_retention": "24h"}, "long"),
    ],
)
def test_term_is_what_the_request_says_in_our_words_or_openais(
    said: dict[str, Any], term: str | None
) -> None:
    checked = Chat.model_validate({"model": "m", "messages": [HELLO], **said})
    assert requested_term(checked) == term


@pytest.mark.spec("G4")
def test_term_is_the_models_where_nothing_is_said_and_at_most_the_tenants() -> None:
    assert allowed_term(None, "extended", "extended") == "extended"
    assert allowed_term(None, "extended", "long") == "long"
    assert allowed_term("extended", "short", "long") == "long"
    assert allowed_term(None, "short", "long") == "short"


@pytest.mark.spec("G2")
def test_key_keeps_the_term_that_was_asked_for_last_for_requests_that_ask_for_none() -> None:
    terms = KeyTerms()
    assert terms.resolve("acme", "m", "conv:c-1", None) is None
    assert terms.resolve("acme", "m", "conv:c-1", "extended") == "extended"
    assert terms.resolve("acme", "m", "conv:c-1", None) == "extended"
    for tenant, served, key in (
        ("b", "m", "conv:c-1"),
        ("acme", "m:a", "conv:c-1"),
        ("acme", "m", ""),
    ):
        assert terms.resolve(tenant, served, key, None) is None
    assert terms.resolve("acme", "m", "conv:c-1", "short") == "short"
    assert terms.resolve("acme", "m", "conv:c-1", None) == "short"
    assert terms.resolve("acme", "m", "", "extended") == "extended"
    assert terms.resolve("acme", "m", "", None) is None, "a request without a key is alone"


@pytest.mark.spec("G2")
def test_key_that_was_used_least_recently_is_forgotten() -> None:
    terms = KeyTerms()
    for number in range(KEYS):
        terms.resolve("acme", "m", f"v5:{number}", "short")
    assert terms.resolve("acme", "m", "v5:0", None) == "short"
    terms.resolve("acme", "m", "v5:more", "short")
    assert terms.resolve("acme", "m", "v5:0", None) == "short"
    assert terms.resolve("acme", "m", "v5:1", None) is None


@pytest.mark.spec("G4")
def test_only_engines_with_a_slab_are_told_a_term() -> None:
    def keeps(engine: str, **model: Any) -> bool:
        made = {"role": "text", "engine": engine, "models": {"m": {"source": "x", **model}}}
        capability = parse_table({"capabilities": {"chat": made}}).capabilities["chat"]
        return keeps_kv(capability, capability.models["m"])

    assert keeps("vllm")
    assert not keeps("vllm", keep_kv=False)
    assert not keeps("llama_server")
    assert not keeps("tests.support.fake_engine:build")
