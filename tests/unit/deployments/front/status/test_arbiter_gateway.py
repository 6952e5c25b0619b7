"""What readiness says of a capability, from the arbiter's state."""

from typing import Any

import pytest

from arbiter.errors import ArbiterUnavailable
from deployments.config.schema import parse_table
from deployments.front.status import arbiter_gateway

MODELS = {"models": {"a": {"source": "x"}, "b": {"source": "x"}}}
TABLE = parse_table({"capabilities": {"chat": {"role": "text", "engine": "m:f", **MODELS}}})
COLD = [{"capability": "chat", "model": "a", "cause": "no such file"}]


ROW = {"ticket": "t", "in_state_s": 1.0, "charged_bytes": {}, "ram_bytes": 0, "lease": None}


def state(failed: bool = False, **models: str) -> dict[str, Any]:
    tickets = [ROW | {"capability": "chat", "model": m, "state": s} for m, s in models.items()]
    tickets.append(ROW | {"capability": "other", "model": "c", "state": "resident"})
    return {"tickets": tickets, "cooldowns": COLD if failed else [], "floors": []}


@pytest.mark.spec("J9")
@pytest.mark.parametrize(
    ("now", "word"),
    [
        (state(), "scaled_to_zero"),
        (state(a="queued"), "loading"),
        (state(a="loading"), "loading"),
        (state(a="loading", b="resident"), "ready"),
        (state(a="draining"), "ready"),
        (state(a="asleep"), "ready"),
        (state(a="loading", b="asleep"), "loading"),
        (state(a="reclaiming"), "scaled_to_zero"),
        (state(failed=True), "failed"),
        (state(failed=True, b="resident"), "ready"),
    ],
)
async def test_readiness_gives_one_state_per_capability(
    now: dict[str, Any], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answers(method: str, *args: object, within_s: float = 0) -> dict[str, Any]:
        return now

    monkeypatch.setattr(arbiter_gateway, "call_arbiter", answers)
    report = (await arbiter_gateway.readiness(TABLE, {}))["chat"]
    assert report["state"] == word
    assert report.get("cause") == ("no such file" if now["cooldowns"] else None)


@pytest.mark.spec("J9")
@pytest.mark.parametrize("states", [("resident", "reclaiming"), ("reclaiming", "resident")])
async def test_readiness_gives_of_several_tickets_of_a_model_the_best(
    states: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = state()
    rows = [ROW | {"capability": "chat", "model": "a", "state": each} for each in states]
    now["tickets"] += rows

    async def answers(method: str, *args: object, within_s: float = 0) -> dict[str, Any]:
        return now

    monkeypatch.setattr(arbiter_gateway, "call_arbiter", answers)
    report = (await arbiter_gateway.readiness(TABLE, {}))["chat"]
    assert report == {"state": "ready", "models": {"a": "resident"}}


@pytest.mark.spec("J9", "A18")
async def test_readiness_without_an_arbiter_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(method: str, *args: object, within_s: float = 0) -> None:
        raise ArbiterUnavailable(within_s)

    monkeypatch.setattr(arbiter_gateway, "call_arbiter", away)
    with pytest.raises(ArbiterUnavailable):
        await arbiter_gateway.readiness(TABLE, {})


@pytest.mark.spec("J9")
@pytest.mark.parametrize(
    ("now", "word", "cause"),
    [
        (state(), "failed", "no builder"),
        (state(a="queued"), "failed", "no builder"),
        (state(failed=True), "failed", "no builder"),
        (state(a="resident"), "ready", "no builder"),  # of the version before
    ],
)
async def test_readiness_is_failed_where_serve_reports_a_failed_application(
    now: dict[str, Any], word: str, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answers(method: str, *args: object, within_s: float = 0) -> dict[str, Any]:
        return now

    monkeypatch.setattr(arbiter_gateway, "call_arbiter", answers)
    report = (await arbiter_gateway.readiness(TABLE, {"chat": "no builder"}))["chat"]
    assert (report["state"], report["cause"]) == (word, cause)


@pytest.mark.spec("K2")
async def test_event_stream_goes_on_with_the_next_arbiter(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [[{"seq": 4, "kind": "model_load"}], None, [], [{"seq": 5, "kind": "x"}]]
    asked = list[int]()

    async def call(method: str, after: int, wait_s: float) -> Any:
        asked.append(after)
        if (answer := answers.pop(0)) is None:
            raise ArbiterUnavailable(2.0)
        return answer

    monkeypatch.setattr(arbiter_gateway, "call_arbiter", call)
    monkeypatch.setattr(arbiter_gateway, "AWAY_S", 0.0)
    stream = arbiter_gateway.event_stream(3)
    pieces = [(await anext(stream)).decode() for _ in range(4)]
    await stream.aclose()
    assert asked == [3, 4, 4, 4]
    assert [piece.partition("\n")[0] for piece in pieces] == [
        "id: 4",
        f": {ArbiterUnavailable(2.0)}",
        ": nothing happened",
        "id: 5",
    ]
