"""The front's application over ASGI: keys, bodies, errors and routes, with no Ray beneath."""

import gzip
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from httpx import ASGITransport, AsyncClient

from arbiter.errors import ArbiterUnavailable, UnknownTicket
from arbiter.units import TicketId
from deployments import messages
from deployments.config.schema import parse_table
from deployments.front import application
from deployments.front.access import keys
from deployments.front.access.auth import Authenticator
from deployments.front.access.keys import Keyring, Scope
from deployments.front.dependencies import VIEWERS_MOST, FrontState, check_site, front_state
from deployments.front.inference.relay import WholeResponse
from deployments.front.inference.schemas import SCHEMAS, PathKind
from deployments.front.inference.service import InferenceService
from deployments.front.middleware.body_limit import (
    MAX_BODY_BYTES,
    MAX_CONFIG_BYTES,
    MAX_STEERING_BYTES,
)
from deployments.front.routes import openai, view
from deployments.front.status import arbiter_gateway
from tests.support.front_application import Arbiter, error
from tests.support.speaker import BODY, FORM, SPEAK, Speaker, table
from tests.support.speaker import Response as Answer

FIXED = b'{"generation": 1, "settings": {"state_file": 1}}'  # read at start only
CHAT = "/v1/chat/completions"


@pytest.mark.spec("L3")
@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", "/v1/nothing", 404, "not_found"),
        ("POST", "/v1/moderations", 404, "not_found"),  # no model judges texts
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/arbiter/settings", 405, "method_not_allowed"),
        ("GET", "/v1/models/none", 404, "model_not_found"),
    ],
)
async def test_unknown_paths_and_methods_are_answered_in_openais_form(
    client: AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    answer = await client.request(method, path)
    assert (answer.status_code, error(answer)["code"]) == (status, code)
    assert error(answer)["type"] == "invalid_request_error"
    assert ("allow" in answer.headers) == (status == 405)


@pytest.mark.spec("J8")
async def test_answer_of_one_piece_is_in_flight_until_its_client_has_it(
    client: AsyncClient, front: FrontState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server of the front lets its end wait for that."""
    seen: list[tuple[int, int]] = []  # of each message: bytes, and calls in flight
    respond = WholeResponse.__call__

    async def noted(answer: WholeResponse, scope: Any, receive: Any, send: Any) -> None:
        async def note(message: Any) -> None:
            seen.append((len(message.get("body", b"")), front.service.in_flight))
            await send(message)

        await respond(answer, scope, receive, note)

    monkeypatch.setattr(WholeResponse, "__call__", noted)
    head = messages.ResponseHead(200, {"content-type": "application/json"})
    speaker = Speaker()
    speaker.response = Answer(messages.FullResponse(head, b"[1, 2]"))
    front.service = InferenceService(speaker.send_of)
    front.service.configure(table())
    answer = await client.post(SPEAK, content=BODY, headers=FORM)
    assert (answer.json(), answer.headers["content-length"]) == ([1, 2], "6")
    assert seen == [(0, 1), (6, 1), (0, 1)]
    assert front.service.in_flight == 0


@pytest.mark.spec("J8", "K1")
@pytest.mark.parametrize("path", ["/arbiter/events", "/arbiter/view/stream"])
async def test_streams_of_what_the_arbiter_does_are_bounded_and_leave_their_places(
    client: AsyncClient, front: FrontState, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async def one(*_: object) -> AsyncIterator[bytes]:
        yield b": nothing happened\n\n"

    monkeypatch.setattr(arbiter_gateway, "event_stream", one)
    monkeypatch.setattr(view, "_sse", one)
    with ExitStack() as viewers:
        for _ in range(VIEWERS_MOST):
            viewers.enter_context(front.viewers.one("default", VIEWERS_MOST))
        refused = await client.get(path)
        assert (refused.status_code, error(refused)["code"]) == (429, "quota_exceeded")
        assert int(refused.headers["retry-after"]) >= 1
    assert (await client.get(path)).status_code == 200
    assert not front.viewers._counts


@pytest.mark.spec("L1")
async def test_events_of_the_arbiter_end_for_a_key_that_is_removed(
    client: AsyncClient, keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = keys.add(keys_file, "watch", "default", frozenset({Scope.VIEW}))
    looks: list[int] = []

    async def events(method: str, after: int, wait_s: float) -> list[dict[str, Any]]:
        looks.append(after)
        assert len(looks) < 4, "it reads on"
        if len(looks) == 2:
            keys.remove(keys_file, key.split("-")[1])
        return [{"seq": len(looks), "kind": "model_load"}]

    monkeypatch.setattr(arbiter_gateway, "call_arbiter", events)
    answer = await client.get("/arbiter/events", headers={"authorization": f"Bearer {key}"})
    assert (answer.status_code, answer.text.count("data: "), looks) == (200, 1, [0, 1])


@pytest.mark.spec("L3")
@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/api/embed", {"input": 5}, "`input`: Input should be a valid string"),
        ("/api/chat", {"options": {"num_predict": "x"}}, "`options.num_predict`: Input should be"),
        ("/api/chat", {"format": 5}, "`format`: Input should be '' or 'json'"),
        ("/api/chat", {"messages": [{"content": "x"}]}, "`messages.0.role`: Field required"),
        ("/api/generate", {"suffix": "x"}, "`suffix`: not served; end the text within `prompt`"),
        ("/v1/responses", {"conversation": "c"}, "`conversation`: not served; use `previous_resp"),
        ("/v1/score", {"queries": "x"}, "`queries`: is not taken; give texts as `text_1`"),
        ("/v1/rerank", {"query": "x"}, "`documents`: give `documents`, or `texts`"),
    ],
)
async def test_wrong_field_is_named_as_the_client_wrote_it_with_what_to_do(
    client: AsyncClient, path: str, body: dict[str, Any], said: str
) -> None:
    filled = {"model": "speaker", "text_1": "x", "text_2": "y"} | body
    answer = await client.post(path, json=filled)
    assert answer.status_code == 400
    told = answer.json()["error"]
    assert (told if isinstance(told, str) else told["message"]).startswith(said)


@pytest.mark.spec("L1", "J1")
async def test_page_of_an_allowed_site_may_ask_and_read_and_no_other(
    client: AsyncClient, front: FrontState, keys_file: Path
) -> None:
    sites = frozenset[str](), frozenset({"https://app.example"})
    front.auth = Authenticator(Keyring(keys_file), *sites)
    speaker = Speaker()
    events = messages.ResponseHead(200, {"content-type": "text/event-stream"})
    speaker.response = Answer(events, b"data: 1\n\n")
    front.service = InferenceService(speaker.send_of)
    front.service.configure(table())
    wish = "authorization,content-type,x-stainless-lang"
    asks = {
        "access-control-request-method": "POST",
        "access-control-request-headers": wish,
        "access-control-request-private-network": "true",  # a public site's, of this machine
    }
    seen, was_streamed, private = [], [], []
    for page in ({"origin": "https://app.example"}, {"origin": "https://x.org"}):
        preflight = await client.options("/v1/chat/completions", headers=page | asks)
        assert preflight.headers["access-control-allow-headers"] == wish
        answers = [
            await client.get(path, headers=page) for path in ("/api/version", "/v1/models/n")
        ]
        streamed = await client.post(SPEAK, content=BODY, headers=FORM | page)
        was_streamed.append(streamed.text == "data: 1\n\n")
        of_page = (preflight, *answers, streamed)
        allowed = "access-control-allow-origin"
        seen.append([(one.status_code, one.headers.get(allowed)) for one in of_page])
        private.append(preflight.headers.get("access-control-allow-private-network"))
    assert private[0] == "true"
    assert was_streamed == [True, False]
    assert seen[0] == [(status, "https://app.example") for status in (200, 200, 404, 200)]
    assert seen[1] == [(status, None) for status in (400, 403, 403, 403)]
    assert "vary" not in (await client.get("/api/version")).headers


def test_request_that_generates_asks_fastapi_for_key_site_and_state_alone(built: FastAPI) -> None:
    """Each dependency, whatever depends on it, costs every request 15 us."""
    [chat] = [r for r in built.routes if isinstance(r, APIRoute) and r.path == CHAT]
    calls = [one.call for one in _all_of(chat.dependant) if one is not chat.dependant]
    assert len(calls) == 3 and {check_site, front_state} < set(calls)


def _all_of(dependant: Dependant) -> Iterator[Dependant]:
    yield dependant
    for inner in dependant.dependencies:
        yield from _all_of(inner)


def test_routes_that_generate_are_compared_before_all_others(built: FastAPI) -> None:
    paths = [route.path for route in built.routes if isinstance(route, APIRoute)]
    generating = {path for path, _ in openai.post_routes(tuple(SCHEMAS))} - set(application.OWN)
    assert set(paths[: len(generating)]) == generating


@pytest.mark.spec("L3")
@pytest.mark.parametrize("path", ["/arbiter/state", "/api/ps"])
async def test_failure_of_the_front_is_answered_in_form_and_to_a_page_that_may_read_it(
    built: FastAPI,
    client: AsyncClient,
    front: FrontState,
    keys_file: Path,
    arbiter: Arbiter,
    path: str,
) -> None:
    site = "https://app.example"
    front.auth = Authenticator(Keyring(keys_file), frozenset(), frozenset({site}))
    arbiter.answers["state"] = ZeroDivisionError("secret")
    transport = ASGITransport(built, raise_app_exceptions=False)
    async with AsyncClient(transport=transport, base_url="http://localhost") as made:
        answer = await made.get(path, headers={"origin": site})
    assert answer.status_code == 500
    assert answer.headers["access-control-allow-origin"] == site
    said = answer.json()["error"]
    message = said if path.startswith("/api") else error(answer)["message"]
    assert "ZeroDivisionError" in message and "secret" not in message
    with pytest.raises(ZeroDivisionError):  # so that it is logged
        await client.get(path)


async def test_form_and_binary_stream_pass_over_http(client: AsyncClient) -> None:
    answer = await client.post(SPEAK, content=BODY, headers=FORM)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "audio/wav"
    assert "content-length" not in answer.headers
    assert answer.content == b"RIFF\x00\xff"


async def test_paths_of_the_table_are_offered_and_described_until_it_changes(
    front: FrontState,
) -> None:
    app = application.build(front)
    async with AsyncClient(transport=ASGITransport(app), base_url="http://localhost") as client:
        assert SPEAK in (await client.get("/openapi.json")).json()["paths"]
        assert (await client.get(SPEAK)).status_code == 405
        front.service.configure(parse_table({"capabilities": {}}))
        application.offer(app)
        assert SPEAK not in (await client.get("/openapi.json")).json()["paths"]
        assert (await client.post(SPEAK, content=BODY, headers=FORM)).status_code == 404
        assert "/v1/embeddings" in (await client.get("/openapi.json")).json()["paths"]


@pytest.mark.spec("L1")
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/arbiter/leases", None),
        ("PUT", "/arbiter/leases/a", {"bytes": 1}),
        ("DELETE", "/arbiter/leases/a", None),
        ("POST", "/arbiter/leases/a/drain", None),
        ("POST", "/arbiter/leases/cleanup", None),
        ("DELETE", "/arbiter/tenants/acme/kept", None),
        ("PUT", "/arbiter/residency/m", {"floor": "host"}),
        ("POST", "/arbiter/models/load/m", None),
        ("POST", "/arbiter/models/unload/m", None),
        ("POST", "/arbiter/models/grow/m", None),
        ("POST", "/arbiter/models/shrink/m", None),
        ("POST", "/arbiter/pressure", {"where": "n", "level": "low"}),
        ("PUT", "/arbiter/settings", {"generation": 1, "settings": {"evict": None}}),
        ("POST", "/arbiter/free", {"gb": 1}),
    ],
)
async def test_routes_that_need_a_key_are_refused_without_one_and_reach_nothing(
    client: AsyncClient, arbiter: Arbiter, keys_file: Path, method: str, path: str, body: object
) -> None:
    answer = await client.request(method, path, json=body)
    assert (answer.status_code, error(answer)["code"]) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"
    token = keys.add(keys_file, "ann", "acme", frozenset({Scope.INFER}))
    ann = {"authorization": f"Bearer {token}"}
    answer = await client.request(method, path, json=body, headers=ann)
    assert (answer.status_code, error(answer)["code"]) == (403, "scope_missing")
    assert not arbiter.calls


@pytest.mark.spec("L1")
async def test_every_route_refuses_a_foreign_host(client: AsyncClient) -> None:
    for path in ("/health", "/ready", "/v1/models", "/arbiter/state"):
        answer = await client.get(path, headers={"host": "evil.example"})
        assert (answer.status_code, error(answer)["code"]) == (403, "host_not_allowed")


@pytest.mark.spec("L3")
@pytest.mark.parametrize(
    ("method", "path", "raw", "param"),
    [
        ("PUT", "/arbiter/leases/a", b'{"bytes": 0}', "bytes"),
        ("PUT", "/arbiter/leases/a", b'{"bytes": 1, "tenants": "x"}', "tenants"),
        ("PUT", "/arbiter/leases/.a", b'{"bytes": 1}', "id"),
        ("PUT", "/arbiter/leases/a", b"{", None),
        ("PUT", "/arbiter/leases/a", b"\xff\xfe", None),
        ("PUT", "/arbiter/leases/a", b"[" * 9_000, None),
        ("PUT", "/arbiter/leases/a", b"[]", "body"),
        ("PUT", "/arbiter/leases/a", b"", "body"),
        ("PUT", "/arbiter/residency/voice", b'{"floor": "sky"}', "floor"),
        ("POST", "/arbiter/pressure", b'{"where": "n", "level": "low", "term_s": 0}', "term_s"),
        ("POST", "/arbiter/models/grow/voice", b"", "model"),
        ("PUT", "/arbiter/settings", b'{"generation": 1, "settings": {}}', "settings"),
        ("PUT", "/arbiter/settings", FIXED, "settings"),
        ("GET", "/arbiter/events/recent?after=x", b"", "after"),
    ],
)  # fmt: skip
async def test_wrong_body_is_400_and_names_its_field(
    client: AsyncClient, arbiter: Arbiter, owner: dict[str, str],
    method: str, path: str, raw: bytes, param: str | None,
) -> None:  # fmt: skip
    answer = await client.request(method, path, content=raw, headers=owner)
    assert answer.status_code == 400
    assert error(answer)["param"] == param
    assert not [call for call in arbiter.calls if call[0] != "state"]


@pytest.mark.spec("L2", "L3")
@pytest.mark.parametrize("encoding", ["gzip", "Deflate", "br", "identity, gzip"])
async def test_packed_body_is_415_naming_the_header_and_is_not_unpacked(
    client: AsyncClient, owner: dict[str, str], encoding: str
) -> None:
    headers = owner | {"content-type": "application/json", "content-encoding": encoding}
    for path in (*SCHEMAS, "/api/chat", "/arbiter/leases", "/arbiter/settings"):
        answer = await client.post(path, content=gzip.compress(b"{}"), headers=headers)
        assert answer.status_code == 415, path
        assert "`content-encoding`" in answer.text and repr(encoding) in answer.text


@pytest.mark.spec("L3")
@pytest.mark.parametrize(
    ("path", "bound"),
    [
        ("/arbiter/leases/a", MAX_STEERING_BYTES),
        ("/arbiter/settings", MAX_CONFIG_BYTES),
        ("/api/v1/config", MAX_CONFIG_BYTES),
        ("/v1/embeddings", MAX_BODY_BYTES),
    ],
)
@pytest.mark.parametrize("is_declared", [True, False])
async def test_body_beyond_its_bound_is_413_having_been_read_no_further(
    client: AsyncClient, owner: dict[str, str], path: str, bound: int, is_declared: bool
) -> None:
    sent_bytes = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent_bytes
        while True:
            sent_bytes += 4096
            assert sent_bytes <= bound + 4096, "it is read without end"
            yield b" " * 4096

    async def body() -> AsyncIterator[bytes]:
        for piece in endless():
            yield piece

    declared = {"content-length": str(bound + 1)} if is_declared else {}
    method = "POST" if path.startswith("/v1") else "PUT"
    answer = await client.request(method, path, content=body(), headers=owner | declared)
    assert (answer.status_code, error(answer)["code"]) == (413, "too_large")
    assert (sent_bytes == 0) == is_declared


@pytest.mark.spec("C12", "L3")
async def test_settings_with_hundreds_of_tenants_are_read(
    client: AsyncClient, owner: dict[str, str]
) -> None:
    tenants = {f"tenant-{number}": {"most_bytes": 1 << 30} for number in range(900)}
    body = {"generation": -1, "settings": {"tenants": tenants}}
    answer = await client.put("/arbiter/settings", json=body, headers=owner)
    assert answer.status_code == 400 and "generation" in answer.text


async def test_typed_body_is_json_whatever_its_content_type_says(
    client: AsyncClient, arbiter: Arbiter, owner: dict[str, str]
) -> None:
    kind = {"content-type": "application/x-www-form-urlencoded"}
    address = "/arbiter/residency/voice"
    answer = await client.put(address, content=b'{"floor": "host"}', headers=owner | kind)
    assert answer.json() == {"model": "voice", "floor": "host"}
    assert arbiter.calls[-1][:3] == ("set_floor", "speak", "voice")


async def test_errors_of_the_arbiter_have_their_status(
    client: AsyncClient, arbiter: Arbiter
) -> None:
    arbiter.answers |= {"state": ArbiterUnavailable(5.0), "explain": UnknownTicket(TicketId("x"))}
    for path in ("/arbiter/state", "/ready"):
        answer = await client.get(path)
        assert (answer.status_code, error(answer)["code"]) == (503, "arbiter_unavailable")
    answer = await client.get("/arbiter/explain/x")
    assert (answer.status_code, error(answer)["code"]) == (404, "ticket_not_found")


async def test_description_names_each_body_and_no_status_that_is_never_sent(
    client: AsyncClient,
) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    operations = [(p, m, one) for p, methods in paths.items() for m, one in methods.items()]
    assert not [path for path, _, one in operations if "422" in one["responses"]]
    for path in ("/arbiter/leases/{lease}", "/arbiter/settings", "/arbiter/residency/{model}"):
        assert "application/json" in paths[path]["put"]["requestBody"]["content"]
    unkeyed = {path for path, _, one in operations if "security" not in one}
    assert unkeyed == {"/", "/console/{name}", "/health", "/ready", "/api/version"}
    takes_form = {path for path, _, one in operations if "multipart/form-data" in json.dumps(one)}
    forms = {path for path, schema in SCHEMAS.items() if schema.kind is PathKind.FORM}
    assert takes_form == {SPEAK, "/v1/files"} | forms


@pytest.mark.spec("L3")
async def test_description_names_refusals_of_bodies_of_remotes_and_of_a_job_that_ends(
    client: AsyncClient,
) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    for path in ("/v1/chat/completions", "/v1/embeddings"):
        assert {"408", "415", "502", "504"} <= paths[path]["post"]["responses"].keys()
    assert "409" in paths["/v1/jobs/{job_id}"]["delete"]["responses"]


@pytest.mark.spec("L3")
async def test_description_says_of_what_is_not_served_what_to_do_and_what_is_harmless(
    client: AsyncClient,
) -> None:
    told = (await client.get("/openapi.json")).json()

    def of_path(path: str) -> dict[str, Any]:
        content = told["paths"][path]["post"]["requestBody"]["content"]
        found: dict[str, Any] = content["application/json"]["schema"]["properties"]
        return found

    ollamas = told["components"]["schemas"]["Generate"]["properties"]
    for fields, name, why, *harmless in (
        (ollamas, "suffix", "not served; end the text within", ""),
        (ollamas, "template", "not served; the model has its own", ""),
        (of_path("/v1/responses"), "conversation", "not served; use `previous_response_id`"),
        (of_path("/v1/score"), "data_1", "is not taken; give texts as `text_1`"),
    ):
        assert fields[name]["description"].startswith(why)
        assert fields[name]["enum"] == [*harmless, None]


@pytest.mark.spec("K4")
@pytest.mark.parametrize("path", ["/docs", "/redoc", "/docs/oauth2-redirect"])
async def test_no_page_of_a_library_is_in_the_consoles_origin(
    client: AsyncClient, path: str
) -> None:
    """FastAPI's load scripts of another site, which could use the key that the console keeps."""
    assert (await client.get(path)).status_code == 404
    assert (await client.get("/openapi.json")).json()["paths"]


@pytest.mark.spec("J8")
async def test_full_front_is_429_before_the_body_is_read(
    client: AsyncClient, front: FrontState
) -> None:
    async def body() -> AsyncIterator[bytes]:
        raise AssertionError("the body is read")
        yield b""

    with front.service.admitted(), front.service.admitted():
        answer = await client.post("/v1/embeddings", content=body())
    assert (answer.status_code, error(answer)["code"]) == (429, "queue_full")
    assert answer.headers["retry-after"] == "1"
    assert front.service.in_flight == 0
