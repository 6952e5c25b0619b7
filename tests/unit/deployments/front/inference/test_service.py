"""InferenceService without HTTP: names, handles, the bound on calls in flight, content types."""

import asyncio
import json
import pickle
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from arbiter.errors import CapabilityFailed, DeadlineUnmet, QueueFull, UnknownModel
from deployments import messages
from deployments.config.schema import ConfigError, parse_table
from deployments.front.inference.request import BadRequest, parse
from deployments.front.inference.service import InferenceService
from tests.support.speaker import AUDIO, BODY, FORM, SPEAK, Response, Speaker, table


@pytest.fixture
def speaker() -> Speaker:
    return Speaker()


@pytest.fixture
def service(speaker: Speaker) -> InferenceService:
    made = InferenceService(speaker.send_of)
    made.configure(table())
    return made


async def call(service: InferenceService, path: str = SPEAK) -> messages.InferenceCall:
    return await service.call(await parse(path, BODY, FORM, service.profiles), "default")


async def test_form_goes_in_and_bytes_come_out_unchanged(
    service: InferenceService, speaker: Speaker
) -> None:
    for _ in range(2):
        parts = [part async for part in service.run(await call(service))]
        assert parts == [AUDIO, b"RIFF", b"\x00\xff"]
    assert speaker.calls[0].body == BODY
    assert speaker.calls[0].headers["content-type"] == FORM["content-type"]
    assert speaker.asked_for == ["speak"]  # one handle for all calls
    assert not speaker.response.was_cancelled


async def test_response_left_early_cancels_the_call(
    service: InferenceService, speaker: Speaker
) -> None:
    parts = service.run(await call(service))
    await anext(parts)
    await parts.aclose()
    assert speaker.response.was_cancelled


@pytest.mark.spec("J8")
def test_table_change_keeps_the_count_of_calls_in_flight(service: InferenceService) -> None:
    with service.admitted(), service.admitted():
        service.configure(table(2, "voice", "other"))
        with pytest.raises(QueueFull, match="bound 2"), service.admitted():
            pass
        service.configure(table(3))
        with service.admitted():
            assert service.in_flight == 3
    assert service.in_flight == 0


class Unassigned:
    """A call that Serve holds, because no replica has room or none runs."""

    was_cancelled = False

    async def __aiter__(self) -> AsyncGenerator[messages.Part, None]:
        await asyncio.Event().wait()
        yield AUDIO

    def cancel(self) -> None:
        self.was_cancelled = True


@pytest.mark.spec("J2", "J8")
@pytest.mark.parametrize("is_stream", [False, True])
async def test_deadline_counts_while_no_replica_takes_the_call(is_stream: bool) -> None:
    held = Unassigned()
    service = InferenceService(lambda name: lambda call: held)
    service.configure(table())
    due = replace(await call(service), deadline_s=0.01, wants_progress=is_stream)
    async with asyncio.timeout(60):
        with pytest.raises(DeadlineUnmet) as unmet:
            await anext(service.run(due))
    assert unmet.value.status_code == 503 and unmet.value.retry_after_s is not None
    assert held.was_cancelled


@pytest.mark.spec("J2")
@pytest.mark.parametrize("is_stream", [False, True])
async def test_answer_of_a_replica_that_took_the_call_in_time_may_come_after_the_deadline(
    speaker: Speaker, is_stream: bool
) -> None:
    """The deadline is for the beginning of the work, which the replica knows of."""
    late = asyncio.Event()

    class Slow(Response):
        async def __aiter__(self) -> AsyncGenerator[messages.Part, None]:
            yield messages.TAKEN
            await late.wait()
            yield AUDIO

    speaker.response = Slow()
    service = InferenceService(speaker.send_of)
    service.configure(table())
    due = replace(await call(service), deadline_s=0.05, wants_progress=is_stream)
    async with aclosing(service.run(due)) as parts:
        if is_stream:
            assert await anext(parts) == messages.TAKEN
        answer = asyncio.ensure_future(anext(parts))
        assert not (await asyncio.wait({answer}, timeout=2 * 0.05))[0]
        late.set()
        assert await answer == AUDIO


@pytest.mark.spec("J2")
async def test_replica_gets_what_is_left_of_the_deadline_when_serve_sends_the_call(
    service: InferenceService, speaker: Speaker
) -> None:
    async with aclosing(service.run(replace(await call(service), deadline_s=1000.0))) as parts:
        await anext(parts)
    [sent] = speaker.calls
    assert sent.due_s is not None
    waited = replace(sent, due_s=sent.due_s - 900.0)  # as if Serve had held it that long
    got = pickle.loads(pickle.dumps(waited))
    assert 0.0 < got.deadline_s <= 100.0 and got.due_s is None
    assert replace(got, deadline_s=1000.0) == replace(sent, due_s=None)
    late = pickle.loads(pickle.dumps(replace(sent, due_s=sent.due_s - 2000.0)))
    assert late.deadline_s == 0.0


async def test_model_of_the_new_table_is_found_after_a_change(service: InferenceService) -> None:
    service.configure(table(2, "other"))
    with pytest.raises(UnknownModel):
        await call(service)


async def test_path_that_the_table_does_not_list_for_the_capability_is_named(
    service: InferenceService,
) -> None:
    with pytest.raises(messages.NotServedHere, match=SPEAK) as caught:
        await call(service, "/v1/other")
    assert (caught.value.status_code, caught.value.param) == (404, "model")


@pytest.mark.spec("J1", "H0")
async def test_no_replica_starts_to_say_that_its_model_is_of_another_path(
    service: InferenceService, speaker: Speaker
) -> None:
    chat = {"role": "text", "engine": "vllm", "models": {"m": {"source": "x"}}}
    service.configure(parse_table({"capabilities": {"chat": chat}}))
    asked = await parse("/v1/embeddings", b'{"model": "m", "input": "x"}', {}, service.profiles)
    with pytest.raises(messages.NotServedHere, match="m is served at /v1/chat/completions"):
        await service.call(asked, "default")
    assert not speaker.asked_for


@pytest.mark.spec("G4")
async def test_no_request_keeps_kv_longer_than_its_tenant_may(service: InferenceService) -> None:
    chat = {"role": "text", "engine": "vllm", "models": {"m": {"source": "x"}}}
    tenants = {"tenants": {"acme": {"longest_kv_term": "short"}}}
    service.configure(parse_table({"arbiter": tenants, "capabilities": {"chat": chat}}))

    async def term(tenant: str, **said: Any) -> str:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **said})
        asked = await parse("/v1/chat/completions", body.encode(), {}, service.profiles)
        made = await service.call(asked, tenant)
        assert isinstance(made, messages.InferenceCall)
        found: str = json.loads(made.body)["kv_transfer_params"]["term"]
        assert made.kv_stays_s == {"extended": 86_400.0, "short": 300.0}[found], "the router's"
        return found

    assert await term("default", prompt_cache_retention="24h") == "extended"
    assert await term("acme", prompt_cache_retention="24h") == await term("acme") == "short"
    talk = {"x_conversation_id": "c-1"}
    assert await term("default", **talk, x_kv_term="short") == "short"
    assert await term("default", **talk) == "short", "a conversation keeps its term"


@pytest.mark.spec("J1", "H7")
@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
async def test_rerank_of_teis_clients_goes_to_the_only_model_that_reranks(
    service: InferenceService, path: str
) -> None:
    """TEI serves one model, so its clients name none; the body is theirs, unchanged."""
    tei = {"query": "which?", "texts": ["a"], "raw_scores": False, "return_text": False}
    body = json.dumps(tei | {"truncate": True, "truncation_direction": "Right"}).encode()
    chat = {"role": "text", "engine": "vllm", "models": {"m": {"source": "x"}}}
    embed = {"role": "embedding", "engine": "vllm", "models": {"e": {"source": "x"}}}

    async def asked(*names: str) -> messages.InferenceCall:
        models = {name: {"source": "x"} for name in names}
        ranks = {"role": "embedding", "class": "rerank", "engine": "vllm", "models": models}
        capabilities = {"chat": chat, "embed": embed} | ({"ranks": ranks} if names else {})
        service.configure(parse_table({"capabilities": capabilities}))
        return await service.call(await parse(path, body, {}, service.profiles), "default")

    found = await asked("ranker")
    assert (found.model, json.loads(found.body)["model"]) == ("ranker", "ranker")
    for names, said in ((("b", "a"), "one of a, b"), ((), f"serves {path}")):
        with pytest.raises(BadRequest, match=said) as caught:
            await asked(*names)
        assert (caught.value.status_code, caught.value.param) == (400, "model")


async def test_capability_without_an_application_is_a_typed_error(speaker: Speaker) -> None:
    service = InferenceService(speaker.send_of)
    raw: Any = {"role": "text", "engine": "m:f", "models": {"voice": {"source": "x"}}}
    service.configure(parse_table({"capabilities": {"silent": raw}}))
    asked = await parse(
        "/v1/completions", b'{"model": "voice", "prompt": "x"}', {}, service.profiles
    )
    with pytest.raises(CapabilityFailed, match="no application"):
        await anext(service.run(await service.call(asked, "default")))


@pytest.mark.parametrize(
    "path", ["rerank", "/v1/{x}", "/v1//x", "/arbiter/x", "/v1/models", "/a/.."]
)
def test_path_that_is_not_plain_or_the_fronts_own_is_refused(path: str) -> None:
    speak = {"role": "text", "engine": "m:f", "models": {"v": {"source": "x"}}, "paths": [path]}
    with pytest.raises(ConfigError, match="path"):
        parse_table({"capabilities": {"speak": speak}})
