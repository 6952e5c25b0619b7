"""The key and the term of a request's KV, by its fields."""

from typing import Any

import pytest

from deployments.config.schema import parse_table
from deployments.front.kv_use import keeps_kv, key_of, term_of
from deployments.front.schemas import Chat, Embeddings
from deployments.front.stable_prefix import stable_run

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
        ({}, "long"),
        ({"prompt_cache_retention": "in_memory"}, "short"),
        ({"prompt_cache_retention": "in-memory"}, "short"),
        ({"prompt_cache_retention": "24h"}, "extended"),
        ({"x_kv_term": "short"}, "short"),
        ({"x_kv_term": "long", "prompt_cache_retention": "24h"}, "long"),
    ],
)
def test_term_is_what_the_request_says_in_our_words_or_openais(
    said: dict[str, Any], term: str
) -> None:
    checked = Chat.model_validate({"model": "m", "messages": [HELLO], **said})
    assert term_of(checked, "long", "extended") == term


@pytest.mark.spec("G4")
def test_term_is_the_models_where_the_request_says_nothing_and_at_most_the_tenants() -> None:
    plain = Chat.model_validate({"model": "m", "messages": [HELLO]})
    day = Chat.model_validate({"model": "m", "messages": [HELLO], "x_kv_term": "extended"})
    assert term_of(plain, "extended", "extended") == "extended"
    assert term_of(plain, "extended", "long") == "long"
    assert term_of(day, "short", "long") == "long"
    assert term_of(plain, "short", "long") == "short"


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
