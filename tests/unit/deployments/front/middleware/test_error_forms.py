"""Errors take the form of the API that was asked, whatever part of the front they come from."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from httpx import ASGITransport, AsyncClient

from arbiter.errors import EngineLost, QueueFull, UnknownModel
from arbiter.units import TicketId
from deployments import messages
from deployments.front import application
from deployments.front.access import keys
from deployments.front.access.auth import Authenticator
from deployments.front.access.keys import Keyring, Scope
from deployments.front.dependencies import FrontState
from deployments.front.inference.service import InferenceService
from deployments.front.middleware.body_limit import MAX_BODY_BYTES
from deployments.front.middleware.error_forms import ErrorForms
from deployments.front.status.serve_status import Applications
from deployments.remotes.offers import RemoteRefused
from tests.support.speaker import Speaker, table

MESSAGES = "/v1/messages"
ASKED: dict[str, Any] = {
    "model": "none",
    "max_tokens": 3,
    "messages": [{"role": "user", "content": "x"}],
}


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[AsyncClient]:
    keys.ensure_first(tmp_path / "keys.json")
    service = InferenceService(Speaker().send_of)
    service.configure(table())
    auth = Authenticator(Keyring(tmp_path / "keys.json"))
    front = FrontState(7, auth, service, Applications(dict))
    transport = ASGITransport(application.build(front))
    async with AsyncClient(transport=transport, base_url="http://localhost") as made:
        yield made


@pytest.mark.spec("J1", "L3")
@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "said"),
    [
        (MESSAGES, {}, 400, "invalid_request_error", "`model`"),
        (MESSAGES, {k: v for k, v in ASKED.items() if k != "max_tokens"}, 400,
         "invalid_request_error", "`max_tokens`"),
        (MESSAGES, ASKED | {"max_tokens": 0}, 400, "invalid_request_error", "`max_tokens`"),
        (MESSAGES, ASKED | {"messages": []}, 400, "invalid_request_error", "`messages`"),
        (MESSAGES + "?beta=true", ASKED, 404, "not_found_error", "none"),
        (MESSAGES + "/count_tokens", ASKED, 404, "not_found_error", "none"),
        (MESSAGES + "/batches", ASKED, 404, "not_found_error", "no route POST"),
    ],
)  # fmt: skip
async def test_anthropics_paths_refuse_in_its_form(
    client: AsyncClient, path: str, body: dict[str, Any], status: int, kind: str, said: str
) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == status
    found = answer.json()
    assert (found["type"], found["error"]["type"]) == ("error", kind)
    assert said in found["error"]["message"]
    assert int(answer.headers["content-length"]) == len(answer.content)


@pytest.mark.spec("J1")
async def test_anthropics_client_has_the_id_of_its_request(client: AsyncClient) -> None:
    asked = {"x-request-id": "mine-1"}
    refused = await client.post(MESSAGES, json=ASKED, headers=asked)
    assert refused.headers["request-id"] == refused.json()["request_id"] == "mine-1"
    other = await client.post("/v1/chat/completions", json=ASKED, headers=asked)
    assert "request-id" not in other.headers and "request_id" not in other.json()


@pytest.mark.spec("J1", "L1", "L2")
async def test_key_and_bound_refuse_in_anthropics_form(client: AsyncClient, tmp_path: Path) -> None:
    keys.add(tmp_path / "keys.json", "ann", "acme", frozenset({Scope.INFER}))  # others are closed
    answer = await client.post(MESSAGES, json=ASKED, headers={"x-api-key": "sk-unknown"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
    answer = await client.post(MESSAGES, content=b" " * (MAX_BODY_BYTES + 1))
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "request_too_large")


@pytest.mark.spec("L1")
async def test_key_of_anthropics_header_counts_as_a_bearer(
    client: AsyncClient, tmp_path: Path
) -> None:
    key = keys.first_key_path(tmp_path / "keys.json").read_text().strip()
    answer = await client.post(MESSAGES, json=ASKED, headers={"x-api-key": key})
    assert answer.status_code == 404  # the key is good, the model is not there


@pytest.mark.spec("J1", "L2")
@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/x.png"}}],
        [{"type": "document", "source": {"type": "base64", "data": "AAAA"}}],
        [{"type": "tool_result", "tool_use_id": "a", "content": [
            {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/x.png"}}]}],
        [{"type": "tool_result", "content": {"type": "tool_result", "content": [
            {"type": "tool_result", "content": [{"type": "tool_result", "content": []}]}]}}],
    ],
)  # fmt: skip
async def test_media_in_anthropics_messages_are_refused_at_any_depth(
    client: AsyncClient, content: object
) -> None:
    asked = ASKED | {"messages": [{"role": "user", "content": content}]}
    answer = await client.post(MESSAGES, json=asked)
    assert answer.status_code == 400
    assert "messages[0].content[0]" in answer.json()["error"]["message"]


@pytest.mark.spec("J1")
async def test_unknown_paths_of_ollama_answer_in_its_form(client: AsyncClient) -> None:
    answer = await client.get("/api/nothing")
    assert answer.status_code == 404
    assert "no route GET /api/nothing" in answer.json()["error"]


@pytest.mark.spec("J1")
async def test_root_answers_head(client: AsyncClient) -> None:
    answer = await client.head("/")
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.spec("J1")
async def test_break_of_a_stream_becomes_anthropics_error_event() -> None:
    broken = messages.stream_error(EngineLost("m", TicketId("t")))
    delta = b"event: delta\n", b'data: {"type": "delta"}\n\n'
    cut = [*delta, delta[0], *(delta[1][at : at + 9] for at in range(0, len(delta[1]), 9))]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for body in (b": waits\n\n", b'event: ping\ndata: {"type": "ping"}\n\n', *cut, broken):
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async with AsyncClient(transport=ASGITransport(ErrorForms(app)), base_url="http://x") as made:
        text = (await made.post(MESSAGES)).text
        plain = (await made.post("/v1/chat/completions")).text
    passed = b"".join(cut).decode()
    assert text.startswith(
        ': waits\n\nevent: ping\ndata: {"type": "ping"}\n\n' + passed + "event: error\ndata: {"
    )
    assert text.count("event: error") == 1
    assert '"type": "overloaded_error"' in text
    assert plain.encode().endswith(broken)


def of_vllm(code: int) -> tuple[messages.ResponseHead, bytes]:
    """A refusal as vLLM writes it."""
    error = {"message": "no", "type": "BadRequestError", "param": None, "code": code}
    return messages.ResponseHead(code, {}), json.dumps({"error": error}).encode()


@pytest.mark.spec("J1")
@pytest.mark.parametrize(
    ("refused", "kind"),
    [
        (messages.refusal(EngineLost("m", TicketId("t"))), "overloaded_error"),
        (messages.refusal(RemoteRefused(504, "deadline_unmet", "late")), "api_error"),
        (messages.refusal(UnknownModel("m", "", ())), "not_found_error"),
        (messages.refusal(RemoteRefused(403, "local_only", "stays")), "permission_error"),
        (messages.refusal(QueueFull("m", 1, 1, 1.0)), "rate_limit_error"),
        (of_vllm(400), "invalid_request_error"),
        (of_vllm(500), "api_error"),
    ],
)
async def test_error_has_one_type_of_anthropics_before_and_after_the_head(
    refused: tuple[messages.ResponseHead, bytes], kind: str
) -> None:
    head, body = refused

    async def app(scope: Any, receive: Any, send: Any) -> None:
        is_late = scope["query_string"] == b"late"
        status, sent = (
            (200, messages.response_event(head, body)) if is_late else (head.status, body)
        )
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": sent})

    async with AsyncClient(transport=ASGITransport(ErrorForms(app)), base_url="http://x") as made:
        early = (await made.post(MESSAGES)).json()
        event = (await made.post(f"{MESSAGES}?late")).text
    assert early["error"]["type"] == kind
    assert json.loads(event.removeprefix("event: error\ndata: ")) == early


@pytest.mark.spec("J1")
async def test_error_of_a_stream_that_is_a_text_becomes_anthropics_too() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b'data: {"error": "broken"}\n\n'})

    async with AsyncClient(transport=ASGITransport(ErrorForms(app)), base_url="http://x") as made:
        event = (await made.post(MESSAGES)).text
    assert event.startswith("event: error\n")
    assert '"type": "api_error", "message": "broken"' in event
