"""What the front itself decides, seen in real answers: templates, profiles, its bound."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import NotFoundError, OpenAI, RateLimitError
from tokenizers import Tokenizer

from models.make_models import default_folder
from tests.graph.conftest import IN_FLIGHT, THINKS, Graph, command_of, until

CHAT, PLAIN = "tiny-chat", "plain-chat"
TEXT = "Who holds the memory?"
HELLO: list[Any] = [{"role": "user", "content": TEXT}]
LONG = 240  # tokens: no answer ends before more than the front takes have come
TOO_MANY = 15


def prompt_tokens(client: OpenAI, model: str, **more: Any) -> int:
    answer = client.chat.completions.create(
        model=model, messages=HELLO, max_tokens=1, extra_body=more
    )
    assert answer.usage is not None
    return answer.usage.prompt_tokens


@pytest.mark.spec("J6")
def test_template_and_thinking_of_a_model_are_seen_in_its_answer(client: OpenAI) -> None:
    tokens = Tokenizer.from_file(str(default_folder() / CHAT / "tokenizer.json"))

    def count(text: str) -> int:
        return len(tokens.encode(text, add_special_tokens=False).ids)

    assert prompt_tokens(client, PLAIN) == count(TEXT + THINKS)
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}  # a request may say otherwise
    assert prompt_tokens(client, PLAIN, **quiet) == count(TEXT)
    assert prompt_tokens(client, CHAT) > count(TEXT)  # the model's own, with its marks


@pytest.mark.spec("J6")
def test_profile_of_a_client_id_changes_the_answers_of_that_client(client: OpenAI) -> None:
    def ask(**more: Any) -> Any:
        body = {"ignore_eos": True, **more}
        return client.chat.completions.create(model="gpt-4o", messages=HELLO, extra_body=body)

    answer = ask(x_client_id="terse")
    assert answer.model == PLAIN
    assert answer.usage.completion_tokens == 3
    with pytest.raises(NotFoundError):
        ask(x_client_id="other")


@pytest.mark.spec("J8")
def test_a_full_front_says_when_to_come_back_and_loses_nothing(client: OpenAI) -> None:
    def ask(_: int) -> int | RateLimitError:
        try:
            answer = client.chat.completions.create(
                model=CHAT, messages=HELLO, max_tokens=LONG, extra_body={"ignore_eos": True}
            )
        except RateLimitError as refused:
            return refused
        assert answer.usage is not None
        return answer.usage.completion_tokens

    with ThreadPoolExecutor(IN_FLIGHT + TOO_MANY) as threads:
        answers = list(threads.map(ask, range(IN_FLIGHT + TOO_MANY)))
    refusals = [answer for answer in answers if isinstance(answer, RateLimitError)]
    assert 1 <= len(refusals) <= TOO_MANY
    for refused in refusals:
        assert int(refused.response.headers["retry-after"]) >= 1
        assert refused.code == "queue_full"
    served = [answer for answer in answers if not isinstance(answer, RateLimitError)]
    assert served == [LONG] * (len(answers) - len(refusals))
    assert client.chat.completions.create(model=CHAT, messages=HELLO, max_tokens=1).choices


@pytest.mark.spec("J8", "J9")
def test_front_that_is_replaced_loses_no_request(graph: Graph, client: OpenAI) -> None:
    """Of those that it has accepted, and of those that it has not read."""

    def pids() -> set[int]:
        return {p for p in graph.workers() if "ray::ServeReplica:front:front" in command_of(p)}

    config = copy.deepcopy(graph.config)
    config["applications"][0]["deployments"][0]["ray_actor_options"] = {"num_cpus": 0.001}
    answered, is_over = list[int](), threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            answer = client.chat.completions.create(model=CHAT, messages=HELLO, max_tokens=2)
            answered.append(len(answer.choices))

    def replaced(wanted: dict[str, Any]) -> None:
        old = pids()
        graph.deploy(wanted)
        until(lambda: not pids() & old and pids(), 60, "another front runs, and the old one ended")
        count = len(answered)
        until(lambda: len(answered) > count + 8, 60, "it answers")

    client.chat.completions.create(model=CHAT, messages=HELLO, max_tokens=2)
    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        try:
            for wanted in (config, graph.config):
                replaced(wanted)
        finally:
            is_over.set()
    assert all(one.exception() is None for one in asking), [one.exception() for one in asking]
