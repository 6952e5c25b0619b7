"""Tasks over ASGI: names, tenants, what is left out, the answering rung's name, the configuration.
Engines answer as scripted."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from httpx import ASGITransport, AsyncClient

from arbiter.errors import SettingsConflict
from arbiter.units import Generation
from deployments.config import boot, runtime_settings
from deployments.config.schema import Table, parse_table
from deployments.front import application
from deployments.front.access import keys
from deployments.front.access.auth import Authenticator
from deployments.front.access.keys import Caller, Keyring, Scope
from deployments.front.dependencies import FrontState
from deployments.front.inference.request import BadRequest, parse
from deployments.front.inference.service import InferenceService
from deployments.front.jobs import async_calls
from deployments.front.status import arbiter_gateway
from deployments.front.status.arbiter_gateway import ArbiterState
from deployments.front.status.serve_status import Applications
from deployments.messages import InferenceCall, Part
from deployments.tasks import climb
from tests.support.speaker import Response
from tests.support.task_front import CHAT, COLD, HELLO, Engines, ScriptedArbiter

CONFIG = "/api/v1/config"
TASKS = {"sum": {"ladder": ["cold", "warm"], "keep_warm_s": 7}, "eyes": {"ladder": ["warm"]}}


def table(**tasks: Any) -> Table:
    models = {name: {"source": "/x", "need": {"weights": "1 MiB"}} for name in ("warm", "cold")}
    speak = {"role": "tts", "engine": "m:f", "models": {"voice": {"source": "/x"}}}
    chat = {"role": "text", "engine": "vllm", "models": models}
    front = {"profiles": {"old": {"aliases": {"gpt-4o": "task:sum"}}}}
    capabilities = {"chat": chat, "speak": speak}
    return parse_table({"front": front, "capabilities": capabilities, "tasks": tasks or TASKS})


@pytest.fixture
def engines() -> Engines:
    return Engines()


@pytest.fixture
def arbiter() -> ScriptedArbiter:
    return ScriptedArbiter(plans={"cold": COLD})


@pytest.fixture
def front(keys_file: Path, engines: Engines, arbiter: ScriptedArbiter) -> FrontState:
    service = InferenceService(engines.send_of)
    service.configure(table())
    auth = Authenticator(Keyring(keys_file))
    return FrontState(7, auth, service, Applications(dict), forecasts=arbiter.forecasts())


@pytest.fixture
async def client(front: FrontState) -> AsyncIterator[AsyncClient]:
    transport = ASGITransport(application.build(front))
    async with AsyncClient(transport=transport, base_url="http://localhost") as made:
        yield made


async def asked(client: AsyncClient, **said: Any) -> tuple[int, Any, str | None]:
    answer = await client.post(CHAT, json={"model": "task:sum", **HELLO, **said})
    fields = answer.json()
    said = fields if "error" in fields else {"model": fields["model"]}
    return answer.status_code, said, answer.headers.get("x-arbiter-served-by")


@pytest.mark.spec("J5")
async def test_warm_rung_answers_for_a_cold_primary_and_is_named(
    client: AsyncClient, engines: Engines
) -> None:
    assert await asked(client) == (200, {"model": "warm"}, "warm")
    [call] = engines.calls
    assert (call.model, call.stay_warm_s) == ("warm", 7.0)
    assert b"x_budget_s" not in call.body
    await asked(client, x_stay_warm=60, x_budget_s=9)
    assert engines.calls[-1].stay_warm_s == 60.0 and b"x_budget_s" not in engines.calls[-1].body
    alias = await client.post(CHAT, json={"model": "gpt-4o", "x_client_id": "old", **HELLO})
    assert alias.json()["model"] == "warm"


@pytest.mark.spec("J5", "C10")
async def test_rungs_are_judged_for_the_tenant_that_asks(
    client: AsyncClient, front: FrontState, arbiter: ScriptedArbiter, keys_file: Path
) -> None:
    limited = {"tenants": {"default": {"maximum": "1 GiB"}}}
    tasks = table(sum={"ladder": ["cold"]})
    limits = parse_table({"arbiter": limited, "capabilities": {}}).arbiter
    front.service.configure(tasks.model_copy(update={"arbiter": limits}))
    arbiter.over_quota = ("default",)
    status, refused, _ = await asked(client)
    assert (status, refused["error"]["code"]) == (400, "task_has_no_model")
    key = keys.add(keys_file, "a test", "acme", frozenset({Scope.INFER, Scope.VIEW}))
    client.headers["authorization"] = f"Bearer {key}"
    assert await asked(client) == (200, {"model": "cold"}, "cold")
    [row] = (await client.get("/arbiter/explain/task:sum")).json()["rungs"]
    assert row["turn"] == 1


@pytest.mark.spec("J5")
async def test_rung_that_lost_its_engine_makes_way_for_the_next(
    client: AsyncClient, engines: Engines
) -> None:
    engines.lost = {"warm"}
    assert await asked(client) == (200, {"model": "cold"}, "cold")
    engines.lost = {"warm", "cold"}
    status, error, _ = await asked(client)
    assert (status, error["error"]["code"]) == (503, "engine_lost")


class Waiting(Response):
    """Of a model that is queued, and stays so."""

    def __init__(self, begun: asyncio.Event) -> None:
        super().__init__()
        self.begun, self.was_left = begun, asyncio.Event()

    async def __aiter__(self) -> AsyncGenerator[Part, None]:
        self.begun.set()
        await self.was_left.wait()
        yield b""

    def cancel(self) -> None:
        self.was_cancelled = True
        self.was_left.set()


@pytest.mark.spec("J5", "A8")
@pytest.mark.parametrize("is_pinned", [False, True])
async def test_rung_whose_wait_grows_past_the_budget_is_cancelled_for_a_sooner_rung(
    client: AsyncClient,
    front: FrontState,
    engines: Engines,
    arbiter: ScriptedArbiter,
    monkeypatch: pytest.MonkeyPatch,
    is_pinned: bool,
) -> None:
    monkeypatch.setattr(climb, "LOOK_S", 0.001)
    waiting = Waiting(asyncio.Event())

    def send(call: InferenceCall) -> Response:
        return waiting if call.model == "cold" else engines.send(call)

    monkeypatch.setattr(front.service, "_send_of", lambda capability: send)
    task = {"ladder": ["cold", "warm"], "budget_s": 5, "pin_primary": is_pinned}
    front.service.configure(table(sum=task))
    arbiter.resident, arbiter.plans = (), {"cold": COLD | {"load_s": 0.1}, "warm": COLD}
    asking = asyncio.ensure_future(asked(client))
    async with asyncio.timeout(60):
        await waiting.begun.wait()
        reads_count = arbiter.states_count
        arbiter.resident, arbiter.plans = ("warm",), {"cold": COLD | {"wait_s": 90.0}}
        arbiter.now_s += 10
        if is_pinned:
            while arbiter.states_count == reads_count:
                await asyncio.sleep(0)
            assert not waiting.was_cancelled
            asking.cancel()
            await asyncio.wait({asking})
            return
        assert await asking == (200, {"model": "warm"}, "warm")
    assert waiting.was_cancelled


@pytest.mark.spec("J5")
async def test_pinned_primary_is_asked_first_though_it_is_cold(
    client: AsyncClient, front: FrontState
) -> None:
    front.service.configure(table(sum={"ladder": ["cold", "warm"], "pin_primary": True}))
    assert await asked(client) == (200, {"model": "cold"}, "cold")


@pytest.mark.spec("J5")
async def test_rungs_that_cannot_have_the_request_are_left_out_each_with_its_reason(
    client: AsyncClient, front: FrontState, engines: Engines
) -> None:
    front.service.configure(table(sum={"ladder": ["voice", "warm:gone", "cold"]}))
    assert await asked(client) == (200, {"model": "cold"}, "cold")
    tools = [{"type": "function", "function": {"name": "f"}}]
    status, error, _ = await asked(client, tools=tools)
    assert (status, error["error"]["code"]) == (400, "task_has_no_model")
    for part in ("voice does not serve", "warm:gone", "cold does not choose tools"):
        assert part in error["error"]["message"]


@pytest.mark.spec("J5")
async def test_unknown_task_is_told_with_those_there_are(client: AsyncClient) -> None:
    status, error, _ = await asked(client, model="task:summ")
    assert status == 404 and "task:sum" in error["error"]["message"]
    assert (await client.get("/v1/models/task:summ")).status_code == 404
    assert (await client.get("/arbiter/explain/task:summ")).status_code == 404


@pytest.mark.spec("J5")
async def test_card_of_a_task_says_what_its_models_can_do_together(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch, arbiter: ScriptedArbiter
) -> None:
    async def state(within_s: float = 0.0) -> ArbiterState:
        return await arbiter.state()

    monkeypatch.setattr(arbiter_gateway, "state", state)
    cards = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
    assert list(cards) == ["cold", "voice", "warm", "task:eyes", "task:sum"]
    card = (await client.get("/v1/models/task:sum")).json()
    assert card == cards["task:sum"]
    assert (card["owned_by"], card["state"], card["estimate_s"]) == ("task", "resident", 0.0)
    assert "chat" in card["capabilities"]


@pytest.mark.spec("J5")
async def test_ollamas_routes_take_a_task_and_name_the_rung(client: AsyncClient) -> None:
    answer = await client.post("/api/chat", json={"model": "task:sum", **HELLO, "stream": False})
    assert (answer.status_code, answer.json()["model"]) == (200, "warm")
    tagged = {"model": "task:sum:latest", "prompt": "Who?", "stream": False}
    assert (await client.post("/api/generate", json=tagged)).json()["model"] == "warm"
    named = tagged | {"model": "gpt-4o:latest"}  # an alias of this profile
    answer = await client.post("/api/generate", json=named, headers={"x-client-id": "old"})
    assert answer.json()["model"] == "warm"
    assert (await client.post("/api/generate", json=named)).status_code == 404


@pytest.mark.spec("J5")
async def test_explanation_names_each_rung_with_its_seconds_and_its_reason(
    client: AsyncClient, front: FrontState
) -> None:
    front.service.configure(table(sum={"ladder": ["cold", "voice", "warm"], "budget_s": 5}))
    sentences = (await client.get("/arbiter/explain/task:sum")).json()
    rows = [
        (r["turn"], r["position"], r["model"], r["state"], r["total_s"]) for r in sentences["rungs"]
    ]
    assert rows == [
        (1, 3, "warm", "resident", 0.5),
        (2, 1, "cold", "cold", 8.0),
        (None, 2, "voice", "cold", None),
    ]
    assert "it serves at once" in sentences["sentences"][0]
    assert "8.0 s, more than the budget of 5.0 s" in sentences["sentences"][1]
    assert sentences["sentences"][2].startswith("Left out: voice")


# -- the configuration ----------------------------------------------------------------------------


class Keeper:
    """The arbiter's part of the settings, as arbiter.server.actor has it."""

    def __init__(self, written: Table) -> None:
        self.table, self.generation = boot.as_plain(written), 3

    async def __call__(self, method: str, *args: Any, within_s: float = 0) -> Any:
        if method == "state":
            return {"table": self.table, "generation": self.generation}
        assert method == "change_settings"
        wanted, of = args
        if of != self.generation:
            raise SettingsConflict(of, Generation(self.generation))
        self.table, self.generation = wanted.table, self.generation + 1
        return self.generation


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Keeper:
    made = Keeper(table())
    monkeypatch.setattr(runtime_settings, "call_arbiter", made)
    return made


@pytest.fixture
def owner(client: AsyncClient, keys_file: Path) -> AsyncClient:
    token = keys.first_key_path(keys_file).read_text().strip()
    client.headers["authorization"] = f"Bearer {token}"
    return client


@pytest.mark.spec("J5")
async def test_configuration_is_read_and_changed_whole_for_one_generation(
    owner: AsyncClient, keeper: Keeper, front: FrontState
) -> None:
    read = await owner.get(CONFIG)
    assert (read.json()["generation"], read.headers["etag"]) == (3, '"3"')
    assert read.json()["tasks"]["sum"]["ladder"] == ["cold", "warm"]
    assert read.json()["settings"]["bypass_count"] == 8
    wanted = {"tasks": {"sum": {"ladder": ["cold"]}}, "settings": {"bypass_count": 5}}
    done = await owner.put(CONFIG, json={"generation": 3, **wanted})
    assert (done.status_code, done.json()["generation"]) == (200, 4)
    assert done.json()["tasks"].keys() == {"sum"} and done.json()["settings"]["bypass_count"] == 5
    assert await asked(owner) == (200, {"model": "cold"}, "cold"), "from the next request on"
    stale = await owner.put(CONFIG, json={"generation": 3, **wanted})
    assert (stale.status_code, stale.json()["error"]["code"]) == (409, "settings_conflict")
    assert "3" in stale.json()["error"]["message"] and "4" in stale.json()["error"]["message"]
    tagged = await owner.put(CONFIG, json={"tasks": {}}, headers={"if-match": '"4"'})
    assert (tagged.status_code, front.table.tasks) == (200, {})
    assert keeper.table["arbiter"]["bypass_count"] == 5, "what is not said stays"


@pytest.mark.spec("J5")
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"generation": 3, "tasks": {"sum": {"ladder": ["none"]}}}, "no model 'none'"),
        ({"generation": 3, "tasks": {"sum": {"ladder": []}}}, "ladder"),
        ({"generation": 3, "tasks": {}, "settings": {"state_file": "x"}}, "state_file"),
        ({"generation": 3}, "say `tasks`"),
        ({"tasks": {}}, "generation"),
        ({"generation": 3, "front": {}}, "front"),
    ],
)
async def test_change_that_is_wrong_in_a_part_changes_nothing(
    owner: AsyncClient, keeper: Keeper, body: dict[str, Any], said: str
) -> None:
    before = keeper.table
    answer = await owner.put(CONFIG, json=body)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]
    assert (keeper.table, keeper.generation) == (before, 3)


@pytest.mark.spec("J5", "L1")
async def test_change_needs_the_scope_admin(client: AsyncClient, keeper: Keeper) -> None:
    assert (await client.put(CONFIG, json={"generation": 3, "tasks": {}})).status_code == 401
    tag = {"if-match": "W/x"}
    assert (await client.get(CONFIG, headers=tag)).status_code == 200, "as long as no key is added"


@pytest.mark.spec("J4", "J5")
async def test_call_of_a_task_that_is_made_later_names_the_task(front: FrontState) -> None:
    asking = await parse(CHAT, json.dumps({"model": "task:sum", **HELLO}).encode(), {}, {})
    call = await front.tasks.call("sum", asking, Caller("ann", frozenset()))
    later = await async_calls.for_later(call)
    assert (later.model, later.tenant, later.path) == ("task:sum", "ann", CHAT)
    away = replace(call.ladder.rungs[0].state, is_remote=True)
    rungs = (replace(call.ladder.rungs[0], state=away),)
    with pytest.raises(BadRequest, match="no model of this machine"):
        await async_calls.for_later(replace(call, ladder=replace(call.ladder, rungs=rungs)))
