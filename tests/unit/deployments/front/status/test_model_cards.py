"""What the cards of models say: what each is good for, its context, where it is and when it could
answer."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from arbiter.errors import ArbiterUnavailable
from deployments.config.model_section import ModelConfig
from deployments.config.schema import Table, parse_table
from deployments.front.status import arbiter_gateway, model_cards
from deployments.front.status.arbiter_gateway import Presence, typed
from tests.support.few_threads import few_threads, is_free
from tests.support.waits import eventually

MODELS = tuple("hot coming asleep never-woken queued leaving gone cold nightly new".split())
ROW = {"capability": "chat", "in_state_s": 1.5, "charged_bytes": {}, "ram_bytes": 0, "lease": None}


def ticket(model: str, state: str, number: int = 1) -> dict[str, Any]:
    return ROW | {"ticket": f"{model}-{number}", "model": model, "state": state}


def took(model: str, load_s: float, wake_s: float | None = None) -> dict[str, Any]:
    return {"capability": "chat", "model": model, "load_s": load_s, "wake_s": wake_s}


STATE: dict[str, Any] = {
    "tickets": [
        ticket("hot", "resident"),
        ticket("hot", "queued", 2),
        ticket("coming", "loading"),
        ticket("asleep", "asleep"),
        ticket("never-woken", "asleep"),
        ticket("queued", "queued"),
        ticket("leaving", "draining"),
        ticket("gone", "reclaiming"),
    ],
    "queue": [{"ticket": "queued-1", "predicted_s": 9.0}],
    "cooldowns": [{"capability": "chat", "model": "cold", "cause": "x", "left_s": 3.0}],
    "floors": [],
    "hours": [
        {
            "work": work,
            "capability": "chat",
            "model": model,
            "hours": "22:00-07:00",
            "is_open": False,
            "left_s": 600.0,
        }
        for work, model in (("model", "nightly"), ("batch", "never-woken"), ("batch", "gone"))
    ],
    "load_times": [
        took("nightly", 2.0),
        took("coming", 4.0),
        took("asleep", 4.0, 0.5),
        took("never-woken", 4.0),
        took("leaving", 2.0),
        took("gone", 2.0),
        took("cold", 2.0),
    ],
}


def table(**more: Any) -> Table:
    config = {"role": "text", "engine": "vllm", "models": {m: {"source": "x"} for m in MODELS}}
    return parse_table({"capabilities": {"chat": config | more}})


@pytest.mark.spec("J1")
def test_each_model_is_where_its_best_ticket_is_with_the_seconds_until_it_could_answer() -> None:
    assert typed(STATE).presences(table().homes) == {
        "hot": Presence("resident", 0.0),
        "coming": Presence("loading", 2.5),
        "asleep": Presence("asleep", 0.5),
        "never-woken": Presence("asleep", 4.0),
        "queued": Presence("queued", 9.0),
        "leaving": Presence("draining", 2.0),
        "gone": Presence("cold", 2.0),
        "cold": Presence("cold", 5.0),  # it failed, and is not tried again for 3 s
        "nightly": Presence("cold", 602.0),  # its hours begin in 600 s
        "new": Presence("cold", None),
    }


@pytest.mark.spec("J1")
async def test_cards_do_without_an_arbiter(monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(method: str, *args: object, within_s: float = 0) -> None:
        raise ArbiterUnavailable(within_s)

    monkeypatch.setattr(arbiter_gateway, "call_arbiter", away)
    found = (await model_cards.facts(table(), ["hot"]))["hot"].plain
    assert found == {
        "capabilities": ["chat", "completions", "responses", "messages"],
        "context_length": None,
        "state": "unknown",
        "estimate_s": None,
    }


def hang(monkeypatch: pytest.MonkeyPatch, source: str) -> tuple[threading.Event, threading.Event]:
    """The arbiter answers, and the file server of that source does not. Returns whether it was
    asked, and what lets it answer."""
    begun, may_end = threading.Event(), threading.Event()

    async def answers(method: str, *args: object, within_s: float = 0) -> dict[str, Any]:
        return STATE

    def context(config: ModelConfig) -> int | None:
        if config.source == source:
            begun.set()
            assert may_end.wait(60)
        return 512

    monkeypatch.setattr(arbiter_gateway, "call_arbiter", answers)
    monkeypatch.setattr(model_cards, "context", context)
    return begun, may_end


@pytest.mark.spec("J1", "J9")
async def test_cards_of_a_model_whose_file_server_hangs_delay_no_call_of_ray_and_no_other_card(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, may_end = hang(monkeypatch, "away")
    monkeypatch.setattr(model_cards, "FILES_S", 60.0)
    made = table(models={"hot": {"source": "away"}, "cold": {"source": "here"}})
    with few_threads():
        asked = [asyncio.ensure_future(model_cards.facts(made, made.homes)) for _ in range(6)]
        try:
            await eventually(begun.is_set)
            card = await asyncio.wait_for(model_cards.facts(made, ["cold"]), 60)
            assert card["cold"].context_length == 512
            assert await is_free()
        finally:
            may_end.set()
        found = await asyncio.gather(*asked)
    assert all(cards["hot"].context_length == 512 for cards in found)


@pytest.mark.spec("J1")
async def test_list_of_models_does_without_the_context_of_a_model_whose_file_server_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, is_back = hang(monkeypatch, "hung")
    monkeypatch.setattr(model_cards, "FILES_S", 0.01)
    made = table(models={"hot": {"source": "hung"}, "cold": {"source": "near"}})
    try:
        found = await asyncio.wait_for(model_cards.facts(made, made.homes), 30)
        assert found["hot"].context_length is None
        assert found["hot"].presence.state == "resident", "the arbiter was asked"
    finally:
        is_back.set()
    assert await model_cards.facts(made, ()) == {}


@pytest.mark.spec("J1")
@pytest.mark.parametrize(
    ("capability", "arguments", "words"),
    [
        ({"role": "vision"}, {}, ("chat", "messages", "vision")),
        ({"role": "embedding"}, {}, ("embeddings",)),
        ({"role": "embedding"}, {"runner": "pooling"}, ("embeddings", "rerank", "score")),
        ({"role": "image"}, {}, ("images", "image_edits", "image_variations")),
        ({"role": "lease"}, {}, ()),
        (
            {"role": "text", "paths": ["/v1/chat/completions", "/v1/hum"]},
            {"enable_auto_tool_choice": True},
            ("chat", "hum", "tools"),
        ),
    ],
)
def test_capabilities_are_those_of_the_role_or_of_the_paths_in_the_table(
    capability: dict[str, Any], arguments: dict[str, Any], words: tuple[str, ...]
) -> None:
    made = table(models={"m": {"source": "x", "engine_args": arguments}}, **capability)
    chat = made.capabilities["chat"]
    assert model_cards.capabilities(chat, chat.models["m"]) == words


@pytest.mark.spec("J1")
@pytest.mark.parametrize(
    ("files", "model", "tokens"),
    [
        ({}, {}, None),
        ({"config.json": '{"max_position_embeddings": 512}'}, {}, 512),
        ({"config.json": '{"text_config": {"max_position_embeddings": 64}}'}, {}, 64),
        ({"config.json": '{"text_config": null, "max_position_embeddings": 512}'}, {}, 512),
        (
            {
                "config.json": '{"max_position_embeddings": 512}',
                "sentence_bert_config.json": '{"max_seq_length": 256}',
            },
            {},
            256,
        ),
        (
            {"config.json": '{"max_position_embeddings": 512}'},
            {"engine_args": {"max_model_len": 128}},
            128,
        ),
        ({}, {"engine_args": {"max_model_len": 128}, "grow_to": {"max_model_len": 1024}}, 1024),
    ],
)
def test_context_is_what_the_engine_is_told_else_what_the_files_say(
    tmp_path: Path, files: dict[str, str], model: dict[str, Any], tokens: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    made = table(models={"m": {"source": str(tmp_path)} | model})
    assert model_cards.context(made.capabilities["chat"].models["m"]) == tokens
