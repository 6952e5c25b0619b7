"""The default chat model and its adapters on vLLM: what they say is right."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest

from models import shipped
from models.chat_tasks import TASKS, Example
from models.train_chat import UNSEEN, held_out_examples
from models.train_chat_adapters import ADAPTERS, draw
from tests.support.engine_host import Child, ZygoteUnderTest, is_gone, until

VLLM = "deployments.engines.vllm.engine:build"
NAME = "small-chat"
COUNT = 50  # examples of each adapter
Asked = tuple[str, Example]  # the model's name, and what it is asked


@pytest.fixture(scope="module")
def chat(engines: ZygoteUnderTest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    shipped.unpack_all(models := tmp_path_factory.mktemp("models"))
    args = {
        "kv_cache_memory_bytes": 128 << 20,
        "max_model_len": 1024,
        "max_num_seqs": 32,
        "enable_lora": True,
        "max_loras": len(ADAPTERS),
        "max_lora_rank": 8,
        "lora_modules": {name: str(models / f"{NAME}-adapters" / name) for name in ADAPTERS},
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
    }
    given = {"model": str(models / NAME), "served_name": NAME, "engine_args": args}
    child = engines.spawn(NAME, VLLM, given).hold()
    status, body = child.ready()
    assert status == 200, body
    yield child
    child.let_go()
    until(lambda: is_gone(child.pid), 60)


@pytest.fixture(scope="module")
def alone(chat: Child) -> list[str]:
    """Answers of the base to questions that come one after the other."""
    return answers(chat)


def answers(chat: Child) -> list[str]:
    return [said(ask(chat, NAME, example)) for example in held_out_examples(1)["facts"][:COUNT]]


def ask(chat: Child, model: str, example: Example, **more: Any) -> dict[str, Any]:
    body = {"model": model, "messages": list(example.messages), "temperature": 0, **more}
    if example.tools:
        body["tools"] = list(example.tools)
    status, answer = chat.call("POST", "/v1/chat/completions", body)
    assert status == 200, answer
    choice: dict[str, Any] = answer["choices"][0]
    return choice


def share_right(chat: Child, asked: list[Asked]) -> float:
    """Asks all of them, many at a time."""

    def is_right(each: Asked) -> bool:
        choice = ask(chat, *each)
        return bool(choice["finish_reason"] == "stop" and said(choice) == each[1].answer)

    with ThreadPoolExecutor(16) as pool:
        right = list(pool.map(is_right, asked))
    return sum(right) / len(right)


def said(choice: dict[str, Any]) -> str:
    content: str = choice["message"]["content"]
    return content


@pytest.mark.spec("H1", "M1")
def test_nine_in_ten_questions_that_were_held_out_are_answered(chat: Child) -> None:
    asked = [(NAME, example) for example in held_out_examples(1)["facts"]]
    assert len(asked) > 300
    assert share_right(chat, asked) >= 0.90


@pytest.mark.spec("H1", "M1")
@pytest.mark.parametrize("task", sorted(TASKS.keys() - {"tool"}))
def test_task_is_done_rightly_on_examples_of_another_seed(chat: Child, task: str) -> None:
    asked = [(NAME, example) for example in held_out_examples(100)[task]]
    assert share_right(chat, asked) >= 0.95


@pytest.mark.spec("J2", "H1")
def test_tools_are_called_with_the_right_name_and_argument(chat: Child) -> None:
    asked = held_out_examples(60)["tool"]
    with ThreadPoolExecutor(16) as pool:
        choices = list(pool.map(lambda example: ask(chat, NAME, example), asked))
    right = 0
    for choice, example in zip(choices, asked, strict=True):
        wanted = json.loads(example.answer.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        calls = [call["function"] for call in choice["message"]["tool_calls"] or []]
        right += [(c["name"], json.loads(c["arguments"])) for c in calls] == [
            (wanted["name"], wanted["arguments"])
        ]
    assert right >= 0.95 * len(asked)


@pytest.mark.spec("J2", "H1")
def test_json_by_a_schema_has_the_values_that_were_said(chat: Child) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    asked = Example(({"role": "user", "content": "As JSON: name Olga and age 42"},), "")
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    assert json.loads(said(ask(chat, NAME, asked, response_format=form))) == {
        "name": "Olga",
        "age": 42,
    }


@pytest.mark.spec("F1", "M1")
def test_eight_adapters_in_one_batch_do_what_they_are_for_and_leave_the_base_as_it_is(
    chat: Child, alone: list[str]
) -> None:
    dice = Random(UNSEEN + 1)
    facts = [(NAME, example) for example in held_out_examples(1)["facts"][:COUNT]]
    by_name = {n: [(n, draw(n, dice, held_out=True)) for _ in range(COUNT)] for n in ADAPTERS}
    mixed = [each for row in zip(facts, *by_name.values(), strict=True) for each in row]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda each: said(ask(chat, *each)), mixed))
    assert found[:: len(by_name) + 1] == alone
    for place, (name, asked) in enumerate(by_name.items(), start=1):
        got = found[place :: len(by_name) + 1]
        right = sum(a == e.answer for a, (_, e) in zip(got, asked, strict=True))
        assert right >= 0.95 * COUNT, f"{name}: {right} of {COUNT}"


@pytest.mark.spec("D1", "D6")
def test_model_whose_head_is_its_embedding_wakes_as_it_fell_asleep(
    chat: Child, alone: list[str]
) -> None:
    assert chat.call("POST", "/control/sleep")[0] == 200
    status, woken = chat.call("POST", "/control/wake")
    assert (status, woken["verified"]) == (200, True)
    assert answers(chat) == alone


# -- stable prefixes ------------------------------------------------------------------------------

ADAPTER = next(iter(ADAPTERS))
BLOCK = 128  # tokens that vLLM caches together on a CPU
TOOL = {"type": "function", "function": {"name": "get_time", "parameters": {"properties": {}}}}


def system(seed: int, words: int = 150) -> dict[str, Any]:
    """Instructions of some blocks, in words that no other test uses."""
    dice = Random(seed)
    return {"role": "system", "content": " ".join(str(dice.random()) for _ in range(words // 10))}


def prewarmed(chat: Child, **prefix: Any) -> tuple[int, int]:
    """Tokens of the prefix, and how many of them were cached already."""
    status, body = chat.call("POST", "/prewarm", {"model": NAME, "next_role": "user", **prefix})
    assert status == 200, body
    return body["prompt_tokens"], body["cached_tokens"]


def cached(chat: Child, **body: Any) -> int:
    """Tokens of a real request that its engine had computed before."""
    status, answer = chat.call(
        "POST", "/v1/chat/completions", {"model": NAME, "max_tokens": 1, **body}
    )
    assert status == 200, answer
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def whole(tokens: int) -> int:
    """Those of whole blocks."""
    return tokens // BLOCK * BLOCK


@pytest.mark.spec("G1")
@pytest.mark.parametrize(
    ("seed", "name", "tools"),
    [(10, NAME, []), (11, NAME, [TOOL]), (12, ADAPTER, []), (13, ADAPTER, [TOOL])],
)
def test_first_request_has_its_prewarmed_prefix_cached_to_the_last_whole_block(
    chat: Child, seed: int, name: str, tools: list[Any]
) -> None:
    prefix: dict[str, Any] = {"messages": [system(seed)], "model": name}
    prefix |= {"tools": tools} if tools else {}
    tokens, before = prewarmed(chat, **prefix)
    assert tokens > BLOCK and before == 0
    asked = {**prefix, "messages": [*prefix["messages"], {"role": "user", "content": "hi"}]}
    assert cached(chat, **asked) == whole(tokens)
    assert prewarmed(chat, **prefix) == (tokens, whole(tokens))


@pytest.mark.spec("G1")
def test_stable_part_of_a_message_is_warmed_without_the_rest_of_it(chat: Child) -> None:
    manual = {"type": "text", "text": system(1)["content"]}
    opened = {"role": "user", "content": [manual]}
    tokens, _ = prewarmed(chat, messages=[], opened=opened)
    asked = {"role": "user", "content": [manual, {"type": "text", "text": "What is it about?"}]}
    assert cached(chat, messages=[asked]) == whole(tokens) > 0


@pytest.mark.spec("G1")
def test_tools_that_change_from_request_to_request_are_no_part_of_the_prefix(chat: Child) -> None:
    """This template writes tools in front of everything, so nothing is left."""
    status, body = chat.call(
        "POST", "/prewarm", {"model": NAME, "messages": [system(2)], "tools": None}
    )
    assert status == 200 and "whole" in body["skipped"]


@pytest.mark.spec("G1", "G2")
def test_prefix_of_one_tenant_or_adapter_warms_no_other(chat: Child) -> None:
    prefix = [system(3)]
    tokens, _ = prewarmed(chat, messages=prefix, cache_salt="acme")
    asked = [*prefix, {"role": "user", "content": "hi"}]
    assert cached(chat, messages=asked) == 0
    assert cached(chat, messages=asked, model=ADAPTER, cache_salt="acme") == 0
    assert cached(chat, messages=asked, cache_salt="acme") == whole(tokens)


@pytest.mark.spec("G6")
@pytest.mark.parametrize(
    ("change", "says"),
    [({"model": "unlisted"}, "unlisted"), ({"messages": [{"role": "system", "content": 7}]}, "")],
)
def test_prefix_that_cannot_be_rendered_is_refused_and_harms_nothing(
    chat: Child, change: dict[str, Any], says: str
) -> None:
    status, body = chat.call("POST", "/prewarm", {"model": NAME, "messages": [], **change})
    assert status == 400 and says in body["error"]["message"]
    assert chat.call("GET", "/control/health")[0] == 200
