"""Commands that look: what they print in a pipe, on a terminal and for programs."""

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from arbiter.core import events as ev
from arbiter.core.settings import TenantLimits
from arbiter.core.types import ModelName
from arbiter.errors import LoadFailed
from arbiter.protocol.json_codec import plain
from arbiter.units import GIB, Bytes, Content, Span, TicketId
from deployments.cli import http
from deployments.config.schema import parse_table
from deployments.front.routes.residency import picture
from deployments.front.status import arbiter_gateway
from tests.support.command_line import Run
from tests.support.core_driver import NODE, PLAIN, CoreDriver, s
from tests.support.scripted_front import ScriptedFront

TABLE = {
    "capabilities": {
        "text": {"role": "text", "engine": "m:f", "models": {"a": {"source": "x"}}},
    }
}


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    """As the real core tells it: a model, a lease, a queued ticket and an account with a limit."""
    limits = (TenantLimits("acme", Bytes(70 * GIB), Bytes(0), None, 1.0),)
    driver = CoreDriver(
        device=80, settings=replace(PLAIN, tenants=limits, lease_tenant_fraction=1.0)
    )
    driver.resident(0, "a", 30, tenant="acme", client="ann")
    driver.beat(0, "a", inflight=2)
    driver.lease(1, "job", 40, tenant="acme")
    driver.ask(2, "b", 50, deadline_s=600)
    view: dict[str, Any] = plain(driver.arbiter.snapshot(s(5)))
    return {"version": "0.1.0", "policy": "learned", "table": TABLE, **view}


@pytest.fixture
def told(front: ScriptedFront, state: dict[str, Any]) -> ScriptedFront:
    front.says("GET", "/arbiter/state", state)
    models = picture(parse_table(state["table"]), arbiter_gateway.typed(state))
    front.says("GET", "/arbiter/residency", {"models": models})
    front.says("GET", "/arbiter/leases", {"leases": [t for t in state["tickets"] if t["lease"]]})
    return front


def rows(text: str) -> dict[str, list[str]]:
    """Cells by the first of their line; columns are two spaces apart."""
    lines = [[c.strip() for c in line.split("  ") if c.strip()] for line in text.splitlines()]
    return {cells[0]: cells[1:] for cells in lines if cells}


@pytest.mark.spec("B7")
def test_status_shows_devices_tickets_and_queue(told: ScriptedFront, run: Run) -> None:
    done = run("status")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("arbiter 0.1.0, epoch 1, policy learned\n")
    found = rows(done.stdout)
    assert found["n/cpu:0"][:3] == ["80.0 GiB", "10.0 GiB", "70.0 GiB"]
    assert found["a"] == ["text", "a", "resident", "5.0 s", "2", "cpu:0 30.0 GiB"]
    assert found["1"] == ["b", "b", "3.0 s", "-", "10 min"]
    assert not [line for line in done.stdout.splitlines() if line != line.rstrip()]


@pytest.mark.spec("B1")
def test_status_shows_each_card_and_what_others_have_on_it(
    front: ScriptedFront, run: Run, state: dict[str, Any]
) -> None:
    [cpu, *others] = state["devices"]
    stranger = {"pid": 77, "name": "blender", "size_bytes": 3 * GIB}
    card = {"device": "n/gpu:1", "kind": "gpu", "name": "NVIDIA A10G", "uuid": "GPU-aaaa"}
    card |= {"capacity_bytes": 24 * GIB, "physical_free_bytes": 21 * GIB}
    front.says(
        *("GET", "/arbiter/state"),
        state | {"devices": [cpu | card | {"foreign_processes": [stranger]}, *others]},
    )
    *_, line = [row for row in run("status").stdout.splitlines() if row.startswith("n/gpu:1")]
    cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
    assert cells[1:] == ["NVIDIA A10G", "GPU-aaaa", "24.0 GiB", "21.0 GiB", "blender 77: 3.0 GiB"]


@pytest.mark.spec("B7")
def test_status_for_programs_is_the_state_as_it_came(
    told: ScriptedFront, run: Run, state: dict[str, Any]
) -> None:
    assert json.loads(run("status", "--json").stdout) == state


def test_status_says_that_the_arbiter_grants_nothing_now(
    front: ScriptedFront, run: Run, state: dict[str, Any]
) -> None:
    for change, says in (
        ({"is_closing": True}, "shutting down"),
        ({"is_settled": False}, "waits for the holders"),
    ):
        front.says("GET", "/arbiter/state", state | change)
        assert says in run("status").stdout


def test_status_shows_what_cools_down_and_after_what(
    front: ScriptedFront, run: Run, state: dict[str, Any]
) -> None:
    cause = str(LoadFailed("a", "no such file", False))
    failed = {"capability": "text", "model": "a", "cause": cause, "times": 3, "left_s": 8.0}
    front.says("GET", "/arbiter/state", state | {"cooldowns": [failed]})
    said = "cooling down: a for 8 s more, after 3 failures: a did not load: no such file"
    assert said in run("status").stdout


def hours(work: str, model: str, is_open: bool, left_s: float) -> dict[str, Any]:
    said = {"work": work, "capability": "text" * bool(model), "model": model}
    return said | {"hours": "22:00-07:00 UTC", "is_open": is_open, "left_s": left_s}


@pytest.mark.spec("C13")
def test_status_and_residency_show_hours_and_when_they_begin_or_end(
    front: ScriptedFront, run: Run, state: dict[str, Any]
) -> None:
    now = [hours("batch", "", False, 60.0), hours("batch", "b", True, 9000.0)]
    state = state | {"hours": [hours("model", "a", False, 1200.0), *now]}
    front.says("GET", "/arbiter/state", state)
    said = run("status").stdout
    assert "hours of a: 22:00-07:00 UTC, opens in 20 min\n" in said
    assert "hours of batch work of every model: 22:00-07:00 UTC, opens in 60.0 s\n" in said
    assert "hours of batch work of b: 22:00-07:00 UTC, closes in 2.5 h\n" in said
    models = picture(parse_table(state["table"]), arbiter_gateway.typed(state))
    front.says("GET", "/arbiter/residency", {"models": models})
    assert rows(run("residency").stdout)["a"][-1] == "22:00-07:00 UTC, opens in 20 min"


def test_a_terminal_gets_colours_and_a_pipe_none(told: ScriptedFront, run: Run) -> None:
    assert "\x1b[" not in run("status").stdout
    terminal = run("status", FORCE_COLOR="1", COLUMNS="160").stdout
    assert "\x1b[32mresident" in terminal and "\x1b[1mdevice" in terminal


@pytest.mark.spec("L1")
def test_a_name_that_a_client_chose_cannot_command_the_terminal(
    front: ScriptedFront, run: Run, state: dict[str, Any]
) -> None:
    account = state["clients"][0] | {"client": "\x1b]0;owned\x07\r\nx"}
    front.says("GET", "/arbiter/state", state | {"clients": [account]})
    said = run("clients", FORCE_COLOR="1").stdout
    assert "owned" in said and "\x1b]" not in said and "\x07" not in said


@pytest.mark.spec("C10")
def test_clients_shows_limits_and_accounts(
    told: ScriptedFront, run: Run, state: dict[str, Any]
) -> None:
    limits, accounts = run("clients").stdout.split("\n\n")
    cells = ["70.0 GiB", "70.0 GiB", "0.0 MiB", "88.1 MiB", "any", "no"]
    assert rows(limits)["acme"] == cells
    cells = [line.split()[:2] for line in accounts.splitlines()[1:]]
    assert cells == [["acme", "-"], ["acme", "ann"]]
    asked = json.loads(run("clients", "--json").stdout)
    assert asked == {"tenants": state["tenants"], "clients": state["clients"]}


@pytest.mark.spec("D8")
def test_residency_shows_where_models_are(told: ScriptedFront, run: Run) -> None:
    assert rows(run("residency").stdout)["a"] == ["text", "device", "cold", "0.0 MiB", "-", "-"]
    [(name, model)] = json.loads(run("residency", "--json").stdout).items()
    assert (name, model["level"]) == ("a", "device")


@pytest.mark.spec("E7", "K4")
def test_adapters_shows_tiers_and_the_share_of_requests_that_needed_no_file(
    front: ScriptedFront, run: Run
) -> None:
    counts = {"hot_count": 2, "rows_count": 5, "hot_hits_count": 90, "hits_count": 6}
    slab = {"owner": "chat/a", "content": "adapter", "misses_count": 4, "evicted_count": 1}
    blocks = {"node": "n", "slab": {"owner": "chat/a", "content": "kv"}}
    front.says("GET", "/arbiter/state", {"slabs": [blocks, {"node": "n", "slab": slab | counts}]})
    names = [f"a:{n}" for n in range(8)] + ["a", "b:x"]
    front.says("GET", "/v1/models", {"data": [{"id": name} for name in names]})
    assert rows(run("adapters").stdout)["a"] == ["n", "2", "3", "3", "90", "6", "4", "96%", "1"]
    [found] = json.loads(run("adapters", "--json").stdout)
    assert found["adapters"] == {"hot": 2, "warm": 3, "cold": 3}
    assert found["hit_rate"] == 0.96


@pytest.mark.spec("A15")
def test_leases_shows_who_holds_what_for_how_long(
    told: ScriptedFront, run: Run, state: dict[str, Any]
) -> None:
    found = rows(run("leases").stdout)
    assert found["job"] == ["job", "acme", "resident", "cpu:0 40.0 GiB", "60 min", "no"]
    [lease] = json.loads(run("leases", "--json").stdout)
    assert lease["ticket"] == "job"


@pytest.mark.spec("K3")
def test_explain_prints_a_sentence_a_line(front: ScriptedFront, run: Run) -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 60)
    driver.beat(0, "a", inflight=1)
    driver.ask(1, "b", 50)
    why = plain(driver.arbiter.explain(TicketId("b"), s(2)))
    front.says("GET", "/arbiter/explain/b%2F1", why)
    assert run("explain", "b/1").stdout.splitlines() == why["sentences"]
    assert json.loads(run("explain", "b/1", "--json").stdout) == why


EVENTS = [
    {"seq": 7, "epoch": 1, "unix_s": 0.5, "kind": "model_load", "ticket": "t1", "model": "a",
     "size_bytes": GIB, "took_s": 1.234},
    {"seq": 8, "epoch": 1, "unix_s": 1.5, "kind": "joined", "ticket": None, "holder": "h\nx"},
]  # fmt: skip


@pytest.mark.spec("E1", "E7")
def test_pool_shows_contents_with_their_hit_rates_and_slabs(front: ScriptedFront, run: Run) -> None:
    driver = CoreDriver()
    kept = (Bytes(2 * GIB), Bytes(3 * GIB))
    slab = ev.SlabReading("1", Content.KV, "text/a", "ab", None, *kept, 8, 5, 2, 10, 1, 4)
    times = (Span(1_500_000_000), Span(250_000_000))
    done = ev.ContentReading(Content.KV, kept[0], 8, 30, 10, 20, 1, 4, 6, 2, *times)
    models = (ModelName("text", "a"), ModelName("text", "b"))
    lease, users = TicketId("l"), (TicketId("a-1"), TicketId("b-1"))
    copy = ev.HostCopyReading(
        "0123456789abcdef", lease, models, users, Bytes(GIB), files_count=3, hits_count=6
    )
    driver.at(1, ev.Measured(NODE, (), (), slabs=(slab,), contents=(done,), copies=(copy,)))
    view = plain(driver.arbiter.snapshot(s(5)))
    front.says("GET", "/arbiter/state", view)
    shown = rows(run("pool", COLUMNS="200").stdout)
    assert shown["n"] == "kv;2.0 GiB;75.0%;20;1;4;2;6;1.5 s;0.2 s".split(";")
    assert shown["n/1"] == "kv;text/a;idle;2.0 GiB;3.0 GiB;8;5;2;1;4;0;ab".split(";")
    weights = "weights;text/a, text/b;a-1, b-1;1.0 GiB;1.0 GiB;3;6;0;0;0;0;0123456789ab"
    assert shown["n/copy-01234567"] == weights.split(";")
    found = json.loads(run("pool", "--json").stdout)
    assert found == {"contents": view["contents"], "slabs": view["slabs"]}


@pytest.mark.spec("D8")
def test_copies_shows_whose_files_are_in_host_ram(front: ScriptedFront, run: Run) -> None:
    driver = CoreDriver()
    models = (ModelName("text", "a"), ModelName("text", "b"))
    used = ev.HostCopyReading("k1", TicketId("l1"), models, (TicketId("a-1"),), Bytes(GIB))
    idle = ev.HostCopyReading(
        "k2", TicketId("l2"), models[:1], (), Bytes(2 * GIB), True, socket="/s"
    )
    driver.at(1, ev.Measured(NODE, (), (), copies=(used, idle)))
    found = plain(driver.arbiter.snapshot(s(5)))["copies"]
    front.says("GET", "/arbiter/host_copies", {"copies": found})
    shown = rows(run("copies", COLUMNS="200").stdout)
    assert shown["k1"] == "n;text/a, text/b;1.0 GiB;a-1;-;-".split(";")
    assert shown["k2"] == "n;text/a;2.0 GiB;-;with its last user;/s".split(";")
    assert json.loads(run("copies", "--json").stdout) == found


@pytest.mark.spec("K1")
def test_events_are_lines_with_bytes_and_seconds(
    front: ScriptedFront, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    front.says("GET", "/arbiter/events/recent?after=6", {"events": EVENTS})
    first, second = run("events", "--after", "6", TZ="UTC").stdout.splitlines()
    assert first.split() == "7 1970-01-01 00:00:00 model_load t1 1.0 GiB 1.23 s model=a".split()
    assert second.endswith("joined            holder=h x")
    lines = run("events", "--after", "6", "--json").stdout.splitlines()
    assert [json.loads(line) for line in lines] == EVENTS


@pytest.mark.spec("K1")
def test_followed_events_go_on_where_the_front_restarts_and_say_how_to_where_it_is_away(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, asked = 0.0, list[int]()

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(int(request.url.params["after"]))
        if (len(asked) > 1 and now_s < 3) or len(asked) > 9:
            raise httpx.ConnectError("refused", request=request)
        told = [event for event in EVENTS if event["seq"] > asked[-1]][:1]
        lines = "".join(f"id: {e['seq']}\ndata: {json.dumps(e)}\n\n" for e in told)
        return httpx.Response(200, text=": nothing happened\n\n" + lines)

    def later(wait_s: float) -> None:
        nonlocal now_s
        now_s += wait_s

    monkeypatch.setattr(http, "transport", lambda: httpx.MockTransport(answer))
    monkeypatch.setattr(http.time, "sleep", later)
    monkeypatch.setattr(http.time, "monotonic", lambda: now_s)
    done = run("events", "--follow", "--json")
    assert [json.loads(line) for line in done.stdout.splitlines()] == EVENTS
    assert asked[:5] == [0, 7, 7, 7, 8]
    assert done.exit_code == 1 and now_s > http.RETURNS_S
    assert "`arbiter events --follow --after 8` goes on from there" in done.stderr


def test_followed_events_that_are_refused_say_so(front: ScriptedFront, run: Run) -> None:
    front.refuses("GET", "/arbiter/events?after=0", 401, "invalid_api_key", "no such API key")
    failed = run("events", "--follow")
    assert failed.exit_code == 1 and "no such API key" in failed.stderr
