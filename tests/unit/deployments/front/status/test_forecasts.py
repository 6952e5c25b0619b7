"""What the front knows of waits, loads and runs: read in the background, bounded in age."""

import asyncio
import threading
from typing import Any

import pytest

from deployments.config.schema import Table, parse_table
from deployments.front.status import forecasts
from deployments.front.status.forecasts import FORGOTTEN_S, FRESH_S, STALE_S, UNSEEN
from deployments.tasks.predict import NOTHING, Prediction
from tests.support.task_front import COLD, ScriptedArbiter
from tests.support.waits import eventually

NEED = {"weights": "1 MiB"}


def table() -> Table:
    models = {name: {"source": "/nowhere", "need": NEED} for name in ("warm", "cold", "far")}
    models["far"] = {"source": "made:no-such-model"}
    return parse_table(
        {"capabilities": {"chat": {"role": "text", "engine": "vllm", "models": models}}}
    )


def limits(tenant: str) -> Table:
    """The table, with a quota of this tenant."""
    arbiter = {"tenants": {tenant: {"maximum": "1 GiB"}}}
    return table().model_copy(
        update={"arbiter": parse_table({"arbiter": arbiter, "capabilities": {}}).arbiter}
    )


@pytest.mark.spec("J5")
async def test_resident_model_is_told_by_the_state_and_a_cold_one_by_the_dry_run() -> None:
    arbiter = ScriptedArbiter(plans={"cold": {"wait_s": 3.0, "load_s": 2.0}})
    seen = await arbiter.forecasts().read(table(), ("warm", "cold", "far"))
    assert seen["warm"].predicted == Prediction("resident", 0.0, 0.0, 0.5)
    assert seen["warm"].run_long_s == 2.0
    assert seen["cold"].predicted == Prediction("cold", 3.0, 2.0, None)
    assert seen["far"].predicted == Prediction("cold", None, None, None), "its files are elsewhere"
    assert arbiter.planned == ["cold"]


@pytest.mark.spec("J5")
async def test_model_that_can_never_be_loaded_says_why_and_one_of_another_table_nothing() -> None:
    never = {"wait_s": None, "load_s": 0.0, "answer": "never", "sentences": ["It is too large."]}
    arbiter = ScriptedArbiter(resident=(), plans={"cold": never})
    seen = await arbiter.forecasts().read(table(), ("warm", "cold"))
    assert seen["cold"].never == "It is too large."
    assert seen["warm"].predicted == NOTHING


@pytest.mark.spec("J5", "C10")
@pytest.mark.parametrize("limited", ["default", "acme"])
async def test_quota_of_a_tenant_bears_on_no_forecast_of_another(limited: str) -> None:
    arbiter = ScriptedArbiter(plans={"cold": COLD}, over_quota=(limited,))
    known, asked = arbiter.forecasts(), limits(limited)
    for tenant in ("default", "acme", "other", "third"):
        seen = (await known.read(asked, ("cold",), tenant))["cold"]
        if tenant == limited:
            assert seen.never == f"{limited} is over its quota."
        else:
            assert (seen.never, seen.predicted.load_s) == (None, 8.0)
    assert len(set(arbiter.planned_for)) == 2, "one stands for all without limits"


@pytest.mark.spec("J5")
async def test_requests_wait_for_a_reading_only_when_the_last_is_stale() -> None:
    arbiter, asked = ScriptedArbiter(), table()
    known = arbiter.forecasts()
    await known.read(asked, ("warm",))
    assert arbiter.states_count == 1
    arbiter.now_s += FRESH_S
    await known.read(asked, ("warm",))
    assert arbiter.states_count == 1, "fresh: nothing is asked"
    arbiter.resident, arbiter.gate = (), asyncio.Event()
    arbiter.now_s += 0.1
    assert (await known.read(asked, ("warm",)))["warm"].predicted.state == "resident"
    await known.read(asked, ("warm",))
    await eventually(lambda: arbiter.states_count == 2)  # one reading for both, behind them
    arbiter.now_s += STALE_S
    waiting = asyncio.ensure_future(known.read(asked, ("warm",)))
    arbiter.gate.set()
    assert (await waiting)["warm"].predicted.state != "resident"


@pytest.mark.spec("J5")
async def test_without_an_arbiter_nothing_is_predicted_and_no_request_waits_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forecasts, "WAIT_S", 0.01)
    arbiter, asked = ScriptedArbiter(away=True), table()
    known = arbiter.forecasts()
    for _ in range(3):
        assert await known.read(asked, ("warm",)) == {"warm": UNSEEN}
    assert arbiter.states_count == 1
    silent = ScriptedArbiter(gate=asyncio.Event())
    assert await silent.forecasts().read(asked, ("warm",)) == {"warm": UNSEEN}


@pytest.mark.spec("J5")
async def test_model_that_no_task_was_asked_for_lately_is_not_planned() -> None:
    arbiter, asked = ScriptedArbiter(plans={"cold": {"wait_s": 0.0, "load_s": 2.0}}), table()
    known = arbiter.forecasts()
    await known.read(asked, ("cold",))
    arbiter.now_s += FORGOTTEN_S + 1
    await known.read(asked, ("warm",))
    assert arbiter.planned == ["cold"]


@pytest.mark.spec("J5")
async def test_new_table_is_read_anew() -> None:
    arbiter = ScriptedArbiter()
    known = arbiter.forecasts()
    await known.read(table(), ("warm",))
    await known.read(table(), ("warm",))
    assert arbiter.states_count == 2


@pytest.mark.spec("J5")
async def test_model_whose_file_server_hangs_keeps_no_other_forecast_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_back, read_files = threading.Event(), forecasts._files

    def hanging(model: str, *rest: Any) -> Any:
        if model == "far":
            is_back.wait()
        return read_files(model, *rest)

    monkeypatch.setattr(forecasts, "_files", hanging)
    monkeypatch.setattr(forecasts, "FILES_S", 0.01)
    arbiter, asked = ScriptedArbiter(resident=("warm", "far")), table()
    known = arbiter.forecasts()
    try:
        for resident in (("warm", "far"), ()):
            arbiter.resident = resident
            arbiter.now_s += 2 * STALE_S
            seen = await known.read(asked, ("far", "warm"))
            states = {seen[model].predicted.state == "resident" for model in ("far", "warm")}
            assert states == {bool(resident)}, "of a model that serves no files are needed"
    finally:
        is_back.set()


@pytest.mark.spec("J5")
async def test_files_that_could_not_be_read_are_said_and_read_again_at_the_next_look(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reads, read_files = [], forecasts._files

    def failing(model: str, *rest: Any) -> Any:
        reads.append(model)
        if len(reads) == 1:
            raise RuntimeError("broken")
        return read_files(model, *rest)

    monkeypatch.setattr(forecasts, "_files", failing)
    arbiter = ScriptedArbiter(plans={"cold": {"wait_s": 3.0, "load_s": 2.0}})
    known, asked = arbiter.forecasts(), table()
    assert (await known.read(asked, ("cold",)))["cold"].predicted.total_s is None
    assert "cold" in caplog.text and "broken" in caplog.text
    arbiter.now_s += 2 * STALE_S
    assert (await known.read(asked, ("cold",)))["cold"].predicted.begins_s == 5.0
    assert reads == ["cold", "cold"]
