"""Ladders with a remote: a server on loopback is the other machine, engines here are scripted."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import ollama
import pytest
from httpx import ASGITransport, AsyncClient

from arbiter.errors import ArbiterUnavailable, EngineLost
from arbiter.units import TicketId
from deployments.config.schema import ConfigError, Table, parse_table
from deployments.front import application
from deployments.front.access import keys
from deployments.front.access.auth import Authenticator
from deployments.front.access.keys import Keyring, Scope
from deployments.front.dependencies import FrontState
from deployments.front.inference.service import InferenceService
from deployments.front.status import arbiter_gateway
from deployments.front.status.serve_status import Applications
from deployments.messages import ResponseHead
from deployments.remotes.body import KNOWN
from deployments.remotes.breaker import RULES, Failure
from deployments.remotes.remotes import Remotes
from tests.support.hostile_remotes import EVENT, JSON, SSE, resets, says
from tests.support.remote_server import WORDS, CountingBook, GoodRemote, good_remote, raw_remote
from tests.support.speaker import Response
from tests.support.task_front import CHAT, COLD, HELLO, Engines, ScriptedArbiter
from tests.unit.deployments.remotes.conftest import KEY, section

THERE, FAR = "cloud/their-chat", "far-chat"
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}}


def table(url: str, paths: tuple[str, ...] = (CHAT,), **task: Any) -> Table:
    """`paths`: of the remote's model."""
    models = {name: {"source": "/x", "need": {"weights": "1 MiB"}} for name in ("warm", "cold")}
    chat = {"role": "text", "engine": "vllm", "models": models}
    usual = {"ladder": ["cold", FAR], "budget_s": 5}
    remotes = section(url).model_dump(mode="json")
    remotes["rows"]["cloud"]["models"][FAR]["paths"] = paths
    return parse_table(
        {
            "capabilities": {"chat": chat},
            "remotes": remotes,
            "tasks": {"sum": usual | task},
        }
    )


@pytest.fixture
async def remote(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GoodRemote]:
    monkeypatch.setenv("THEIR_KEY", KEY)
    async with good_remote() as running:
        yield running


@pytest.fixture
def engines() -> Engines:
    return Engines()


@pytest.fixture
def front(remote: GoodRemote, engines: Engines, tmp_path: Path) -> FrontState:
    service = InferenceService(engines.send_of, Remotes(CountingBook()))
    service.configure(table(remote.url))
    auth = Authenticator(Keyring(tmp_path / "keys.json"))
    known = ScriptedArbiter(plans={"cold": COLD}).forecasts()
    return FrontState(7, auth, service, Applications(dict), forecasts=known)


def key(tmp_path: Path, *scopes: Scope) -> str:
    return keys.add(tmp_path / "keys.json", "a test", "default", frozenset(scopes))


@pytest.fixture
async def client(front: FrontState, tmp_path: Path) -> AsyncIterator[AsyncClient]:
    """With a key that may send requests away."""
    headers = {"authorization": f"Bearer {key(tmp_path, Scope.INFER, Scope.VIEW, Scope.CLOUD)}"}
    transport = ASGITransport(application.build(front))
    async with AsyncClient(
        transport=transport, base_url="http://localhost", headers=headers
    ) as made:
        yield made
    await front.service.remotes.background.done()


async def by(client: AsyncClient, **said: Any) -> str | None:
    """Who has answered."""
    answer = await client.post(CHAT, json={"model": "task:sum", **HELLO, **said})
    assert answer.status_code == 200, answer.text
    return answer.headers.get("x-arbiter-served-by")


@pytest.mark.spec("J5")
async def test_remote_answers_where_the_models_here_exceed_the_budget(
    client: AsyncClient, front: FrontState, remote: GoodRemote
) -> None:
    assert await by(client) == THERE, "a load of 8 s, of a budget of 5 s"
    assert await by(client, x_budget_s=20) == "cold"
    front.service.configure(table(remote.url, ladder=["cold", FAR, "warm"]))
    assert await by(client) == "warm", "one here keeps the budget"
    front.service.configure(table(remote.url, budget_s=None))
    assert await by(client) == "cold", "no budget, no haste"
    assert len(remote.seen) == 1


@pytest.mark.spec("J5")
async def test_no_key_without_cloud_and_no_local_only_request_leaves(
    client: AsyncClient, remote: GoodRemote, tmp_path: Path
) -> None:
    assert await by(client, x_local_only=True) == "cold"
    poor = {"authorization": f"Bearer {key(tmp_path, Scope.INFER, Scope.VIEW)}"}
    answer = await client.post(CHAT, json={"model": "task:sum", **HELLO}, headers=poor)
    assert answer.headers["x-arbiter-served-by"] == "cold"
    sentences = (await client.get("/arbiter/explain/task:sum", headers=poor)).json()
    assert [(row["model"], row["turn"]) for row in sentences["rungs"]] == [("cold", 1), (FAR, None)]
    assert "scope `cloud`" in sentences["sentences"][1]
    secret = [{"role": "user", "content": "AKIAIOSFODNN7EXAMPLE is the key"}]
    assert await by(client, messages=secret) == "cold"
    assert remote.seen == []


@pytest.mark.spec("J5", "J1")
@pytest.mark.parametrize("name", [FAR, f"{FAR}:latest"])
async def test_ollamas_routes_take_a_remote_model_and_show_it_to_keys_that_may_use_it(
    client: AsyncClient, remote: GoodRemote, tmp_path: Path, name: str
) -> None:
    said = {"model": name, **HELLO, "stream": False}
    answer = await client.post("/api/chat", json=said)
    assert (answer.status_code, answer.json()["message"]["content"]) == (200, "".join(WORDS))
    assert [one.body["model"] for one in remote.seen] == ["their-chat"]
    card = (await client.post("/api/show", json={"model": name})).json()
    assert card["details"]["family"] == "cloud" and card["capabilities"] == ["completion"]
    poor = {"authorization": f"Bearer {key(tmp_path, Scope.INFER)}"}
    assert (await client.post("/api/chat", json=said, headers=poor)).status_code == 403
    shown = await client.post("/api/show", json={"model": name}, headers=poor)
    assert shown.status_code == 404


@pytest.mark.spec("J5", "J1")
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/api/chat", HELLO),
        ("/api/generate", {"prompt": "a"}),
        ("/api/generate", {"prompt": "a", "raw": True}),
        ("/api/generate", {}),
        ("/api/embed", {"input": "a"}),
    ],
)
async def test_no_local_only_request_of_ollamas_routes_leaves(
    client: AsyncClient, front: FrontState, remote: GoodRemote, path: str, asked: dict[str, Any]
) -> None:
    front.service.configure(table(remote.url, tuple(KNOWN)))
    stays = {"model": FAR, **asked, "stream": False, "x_local_only": True}
    for headers in ({}, {"x-local-only": "0"}):
        refused = await client.post(path, json=stays, headers=headers)
        assert refused.status_code == 403 and "x_local_only" in refused.text
    misspelt = await client.post(path, json={**stays, "x_local_onyl": True})
    assert misspelt.status_code == 400 and "x_local_onyl" in misspelt.text
    assert remote.seen == []


@pytest.mark.spec("J5", "J1")
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/api/chat", HELLO),
        ("/api/generate", {"prompt": "a"}),
        ("/api/generate", {}),
        ("/api/embed", {"input": "a"}),
        ("/v1/chat/completions", HELLO),
    ],
)
async def test_answer_of_a_remote_without_its_fields_is_no_answer_on_any_route(
    client: AsyncClient, front: FrontState, path: str, asked: dict[str, Any]
) -> None:
    async with raw_remote(says(JSON + b'\r\n{"id": "there"}')) as port:
        front.service.configure(table(f"http://127.0.0.1:{port}/v1", tuple(KNOWN)))
        answer = await client.post(path, json={"model": FAR, **asked, "stream": False})
    assert answer.status_code == 502
    error = answer.json()["error"]
    said = error if isinstance(error, str) else error["message"]
    assert "of its answer is missing" in said


@pytest.mark.spec("J5", "J1")
async def test_ollamas_client_lists_a_remote_model_to_keys_that_may_use_it(
    client: AsyncClient, front: FrontState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(method: str, *args: object, within_s: float = 0) -> None:
        raise ArbiterUnavailable(within_s)

    monkeypatch.setattr(arbiter_gateway, "call_arbiter", away)
    transport = ASGITransport(application.build(front))
    poor = {"authorization": f"Bearer {key(tmp_path, Scope.INFER)}"}

    async def listed(headers: Any) -> dict[str | None, ollama.ListResponse.Model]:
        llama = ollama.AsyncClient("http://localhost", headers=headers, transport=transport)
        return {row.model: row for row in (await llama.list()).models}

    found = await listed(client.headers)
    assert found.keys() == {"warm", "cold", FAR} and (await listed(poor)).keys() == {"warm", "cold"}
    row = found[FAR]
    assert (row.size, len(row.digest or ""), row.details and row.details.family) == (0, 64, "cloud")
    assert row.modified_at is not None and row.modified_at.timestamp() == front.started_unix_s
    plain = (await client.get("/api/tags")).json()["models"][-1]
    assert (plain["remote_model"], plain["remote_host"]) == ("their-chat", "cloud")
    assert (plain["capabilities"], plain["state"]) == (["completion"], "remote")


@pytest.mark.spec("J5")
async def test_without_cloud_fallback_a_remote_is_asked_as_primary_only(
    client: AsyncClient, front: FrontState, remote: GoodRemote
) -> None:
    front.service.configure(table(remote.url, allow_cloud_fallback=False))
    assert await by(client) == "cold"
    front.service.configure(table(remote.url, ladder=[FAR, "warm"], allow_cloud_fallback=False))
    assert await by(client) == THERE
    assert len(remote.seen) == 1


@pytest.mark.spec("J5")
async def test_model_here_answers_where_the_remote_fails_and_the_other_way_round(
    client: AsyncClient, front: FrontState, remote: GoodRemote, engines: Engines
) -> None:
    remote.status = 503
    assert await by(client) == "cold"
    assert len(remote.seen) == len(engines.calls) == 1
    remote.status, engines.lost = 200, {"warm"}
    front.service.configure(table(remote.url, ladder=["warm", FAR]))
    assert await by(client) == THERE
    assert remote.seen[-1].body["messages"] == HELLO["messages"]


@pytest.mark.spec("J5")
async def test_stream_that_breaks_after_its_first_token_is_not_begun_anew_elsewhere(
    client: AsyncClient, front: FrontState, remote: GoodRemote, engines: Engines
) -> None:
    head = ResponseHead(200, {"content-type": "text/event-stream"})

    class Breaking(Response):
        async def __aiter__(self) -> Any:
            yield head
            yield b'data: {"choices": [{"delta": {"content": "He"}}]}\n\n'
            raise EngineLost("warm", TicketId("t"))

    engines.send = lambda call: Breaking()  # type: ignore[method-assign]
    front.service.configure(table(remote.url, ladder=["warm", FAR]))
    answer = await client.post(CHAT, json={"model": "task:sum", **HELLO, "stream": True})
    assert answer.headers["x-arbiter-served-by"] == "warm"
    assert '"He"' in answer.text and "engine_lost" in answer.text
    assert WORDS[0] not in answer.text and remote.seen == []


@pytest.mark.spec("J5")
async def test_no_rung_follows_a_remote_that_breaks_off_after_its_first_token(
    client: AsyncClient, front: FrontState, engines: Engines
) -> None:
    async with raw_remote(resets(SSE + b"\r\n" + EVENT)) as port:
        url = f"http://127.0.0.1:{port}/v1"
        front.service.configure(table(url, ladder=[FAR, "warm"]))
        answer = await client.post(CHAT, json={"model": "task:sum", **HELLO, "stream": True})
    assert answer.headers["x-arbiter-served-by"] == THERE
    assert EVENT.decode() in answer.text and "remote_failed" in answer.text
    assert engines.calls == []


@pytest.mark.spec("J5")
async def test_refusals_of_all_rungs_say_each_reason_and_when_to_come_again(
    client: AsyncClient, front: FrontState, remote: GoodRemote
) -> None:
    front.service.configure(table(remote.url, ladder=[FAR]))
    refused = await client.post(CHAT, json={"model": "task:sum", **HELLO, "x_local_only": True})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "task_has_no_model")
    assert "x_local_only" in error["message"]
    remote.status = 503
    for _ in range(RULES[Failure.SERVER].in_a_row):
        failed = await client.post(CHAT, json={"model": "task:sum", **HELLO})
        assert (failed.status_code, failed.json()["error"]["code"]) == (502, "remote_failed")
    cooling = await client.post(CHAT, json={"model": "task:sum", **HELLO})
    assert (cooling.status_code, cooling.json()["error"]["code"]) == (503, "task_has_no_model")
    assert int(cooling.headers["retry-after"]) >= 1


@pytest.mark.spec("J5")
def test_ladder_may_name_remotes_of_the_table_and_no_others() -> None:
    with pytest.raises(ConfigError, match="no model 'other-far'; there is: cold, far-chat, warm"):
        table("http://127.0.0.1:1/v1", ladder=["cold", "other-far"])
