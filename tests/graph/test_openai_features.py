"""More of OpenAI's API with its official client: tools, structured output, logprobs, n, responses.

The model's weights are random, so what is checked is what no weights can change: shapes, counts,
grammars, and that the same seed says the same.
"""

import base64
import json
import re
import struct
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, BadRequestError, OpenAI, PermissionDeniedError
from tokenizers import Tokenizer

from deployments.front.access import keys
from deployments.front.access.keys import Scope
from models.make_models import default_folder
from tests.graph.conftest import Graph, until
from tests.support.graph_commands import queue
from tests.support.graph_tasks import WIDE, in_use

CHAT, SMALL, EMBED = "tiny-chat", "small-chat", "all-minilm-l6-v2"
LEFT, DRAFTED = "left-chat", "drafted-chat"  # neither fits beside WIDE, as SMALL does not
HELLO: list[Any] = [{"role": "user", "content": "Who holds the memory?"}]
ANSWER = {
    "type": "object",
    "properties": {"holder": {"enum": ["arbiter", "nobody"]}, "sure": {"type": "boolean"}},
    "required": ["holder", "sure"],
    "additionalProperties": False,
}
LEND = {
    "name": "lend",
    "description": "Lend device memory.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"device": {"enum": ["cpu", "gpu"]}},
        "required": ["device"],
        "additionalProperties": False,
    },
}


def briefly() -> dict[str, int]:
    """A call's grammar allows any white space and any number of calls, of which random weights find
    no end."""
    tokens = Tokenizer.from_file(str(default_folder() / CHAT / "tokenizer.json"))
    words = {str(token): tokens.decode([token]) for token in range(tokens.get_vocab_size())}
    blanks = {token: -100 for token, word in words.items() if word.isspace()}
    return blanks | {token: 100 for token, word in words.items() if word == "]"}


@pytest.mark.spec("J1")
def test_a_tool_that_must_be_called_is_called_with_lawful_arguments(client: OpenAI) -> None:
    tools: list[Any] = [{"type": "function", "function": LEND}]
    named: Any = {"type": "function", "function": {"name": "lend"}}
    for choice in (named, "required"):
        answer = client.chat.completions.create(
            model=CHAT,
            messages=HELLO,
            tools=tools,
            tool_choice=choice,
            max_tokens=256,
            logit_bias=briefly(),
            seed=1,
        )
        [call, *_] = answer.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "lend"
        assert json.loads(call.function.arguments)["device"] in ("cpu", "gpu")
    free = client.chat.completions.create(
        model=CHAT, messages=HELLO, tools=tools, tool_choice="auto", max_tokens=4
    )
    assert free.choices[0].finish_reason in ("length", "stop", "tool_calls")


@pytest.mark.spec("J1")
def test_structured_output_follows_its_schema(client: OpenAI) -> None:
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": ANSWER, "strict": True},
    }
    answer = client.chat.completions.create(
        model=CHAT, messages=HELLO, response_format=form, max_tokens=64
    )
    said = json.loads(answer.choices[0].message.content or "")
    assert said["holder"] in ("arbiter", "nobody")
    assert isinstance(said["sure"], bool)


@pytest.mark.spec("J1")
def test_logprobs_n_stop_seed_and_usage_are_honoured(client: OpenAI) -> None:
    def ask(**more: Any) -> Any:
        given = {"max_tokens": 4, "extra_body": {"ignore_eos": True}, **more}
        return client.chat.completions.create(model=CHAT, messages=HELLO, **given)

    answer = ask(n=3, seed=7, temperature=1, logprobs=True, top_logprobs=2)
    again = ask(n=3, seed=7, temperature=1, logprobs=True, top_logprobs=2)
    texts = [choice.message.content for choice in answer.choices]
    assert len(texts) == 3
    assert [choice.message.content for choice in again.choices] == texts
    [*tokens] = answer.choices[0].logprobs.content
    assert len(tokens) == 4
    assert all(len(t.top_logprobs) == 2 and t.logprob <= 0 for t in tokens)
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    whole = ask(temperature=0, max_tokens=16).choices[0].message.content
    stop = whole[5:7]
    stopped = ask(temperature=0, max_tokens=16, stop=[stop]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.message.content == whole[: whole.index(stop)]


@pytest.mark.spec("J1")
def test_a_stream_ends_with_its_usage_when_asked(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=CHAT, messages=HELLO, max_tokens=3, stream=True,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
    )  # fmt: skip
    *_, last = stream
    assert last.usage is not None
    assert last.usage.completion_tokens == 3


@pytest.mark.spec("J1")
def test_completions_take_several_prompts_and_echo_with_logprobs(client: OpenAI) -> None:
    answer = client.completions.create(
        model=CHAT, prompt=["one", "two"], n=2, max_tokens=2, echo=True, logprobs=1, temperature=1
    )
    assert [choice.text[:3] for choice in answer.choices] == ["one", "one", "two", "two"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs


@pytest.mark.spec("J1")
def test_responses_answer_whole_streamed_and_structured(client: OpenAI) -> None:
    whole = client.responses.create(model=CHAT, input="Who?", max_output_tokens=8, temperature=0)
    assert whole.object == "response"
    assert whole.usage is not None
    events = list(
        client.responses.create(
            model=CHAT, input="Who?", max_output_tokens=8, temperature=0, stream=True
        )
    )
    assert events[0].type == "response.created"
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == whole.output_text
    form: Any = {"format": {"type": "json_schema", "name": "a", "schema": ANSWER, "strict": True}}
    formed = client.responses.create(model=CHAT, input="Who?", max_output_tokens=64, text=form)
    assert json.loads(formed.output_text)["holder"] in ("arbiter", "nobody")


@pytest.mark.spec("J1", "H1")
def test_embeddings_are_the_same_as_floats_and_as_base64(graph: Graph, client: OpenAI) -> None:
    """The client asks for base64 by itself, and turns it into floats."""
    row = client.embeddings.create(model=EMBED, input="a ticket").data[0].embedding
    _, plain = graph.post("/v1/embeddings", {"model": EMBED, "input": "a ticket"})
    assert plain["data"][0]["embedding"] == pytest.approx(row, abs=1e-6)
    _, packed = graph.post(
        "/v1/embeddings", {"model": EMBED, "input": "a ticket", "encoding_format": "base64"}
    )
    raw = base64.b64decode(packed["data"][0]["embedding"])
    assert struct.unpack(f"<{len(raw) // 4}f", raw) == pytest.approx(row, abs=1e-6)
    assert plain["usage"]["prompt_tokens"] > 0
    whole = client.embeddings.create(model=EMBED, input="a ticket", dimensions=len(row))
    assert whole.data[0].embedding == pytest.approx(row, abs=1e-6)
    with pytest.raises(BadRequestError) as caught:
        client.embeddings.create(model=EMBED, input="a ticket", dimensions=64)
    assert "dimensions" in caught.value.message


# -- what is ours ----------------------------------------------------------------------------------


@pytest.mark.spec("J2")
def test_extension_fields_do_not_disturb_an_answer(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=CHAT,
        messages=HELLO,
        max_tokens=2,
        extra_body={"x_priority": "low", "x_deadline_s": 60, "x_conversation_id": "c-1"},
        extra_headers={"x-client-id": "test", "x-stay-warm": "1"},
    )
    assert answer.choices
    with pytest.raises(APIError) as caught:  # above normal, and there is no key
        client.chat.completions.create(
            model=CHAT, messages=HELLO, max_tokens=2, extra_body={"x_priority": "urgent"}
        )
    assert caught.value.code == "invalid_api_key"


@pytest.mark.spec("J2", "C2")
def test_ticket_has_the_priority_that_a_key_may_ask_for_in_body_or_header(
    graph: Graph, client: OpenAI, keys_file: Path
) -> None:
    scopes = frozenset({Scope.INFER, Scope.PRIORITY})
    hasty = client.with_options(api_key=keys.add(keys_file, "ann", "ann", scopes))
    plain = client.with_options(
        api_key=keys.add(keys_file, "bob", "bob", scopes - {Scope.PRIORITY})
    )
    with pytest.raises(PermissionDeniedError):
        plain.chat.completions.create(
            model=LEFT, messages=HELLO, extra_headers={"x-priority": "urgent"}
        )
    with (
        in_use(graph, WIDE),
        waiting(plain, SMALL, extra_body={"x_priority": "low"}),
        waiting(hasty, DRAFTED, extra_body={"x_priority": "high"}),
        waiting(hasty, LEFT, extra_headers={"x-priority": "urgent"}),
    ):
        assert queue(graph) == [(LEFT, "urgent"), (DRAFTED, "high"), (SMALL, "low")]


@pytest.mark.spec("J3")
def test_stream_behind_another_model_of_its_replica_is_told_its_place(
    graph: Graph, client: OpenAI
) -> None:
    with in_use(graph, WIDE), waiting(client, SMALL) as first, waiting(client, LEFT) as second:
        assert "phase=queued position=0" in first
        assert "phase=queued position=1" in second


@contextmanager
def waiting(client: OpenAI, model: str, **more: Any) -> Iterator[str]:
    """A stream for a model that finds no room; what it was told once it was queued."""
    with client.chat.completions.with_streaming_response.create(
        model=model, messages=HELLO, max_tokens=2, stream=True, **more
    ) as answer:
        lines = answer.iter_lines()  # whose end would be the stream's
        yield next(line for line in lines if "phase=queued" in line)


@pytest.mark.spec("J3")
def test_request_that_waits_for_a_load_gets_progress_comments_and_headers(
    graph: Graph, client: OpenAI
) -> None:
    """A stream by comments, which the official client skips; others by headers, afterwards."""
    ask = client.chat.completions.with_raw_response.create
    for _ in range(2):  # of the first wake nothing is known before
        make_room(graph, client)
        waited = ask(model=SMALL, messages=HELLO, max_tokens=2)
        assert float(waited.headers["x-arbiter-waited-s"]) > 0
    assert float(waited.headers["x-arbiter-estimate-s"]) > 0
    at_once = ask(model=SMALL, messages=HELLO, max_tokens=2)
    assert "x-arbiter-waited-s" not in at_once.headers
    make_room(graph, client)
    body = {"model": SMALL, "messages": HELLO, "max_tokens": 2, "stream": True}
    request = urllib.request.Request(
        f"{graph.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as stream:
        blocks = stream.read().decode().strip().split("\n\n")
    told = [block for block in blocks if block.startswith(": ")]
    # The model that has its place may go on for a moment, and the load follows.
    assert any(re.search(r"phase=(queued|loading) position=0 estimate_s=", line) for line in told)
    assert blocks[: len(told)] == told
    assert blocks[-1] == "data: [DONE]"
    make_room(graph, client)
    chunks = list(
        client.chat.completions.create(model=SMALL, messages=HELLO, max_tokens=2, stream=True)
    )
    assert chunks[-1].choices[0].finish_reason


def make_room(graph: Graph, client: OpenAI) -> None:
    """Until the model is asleep: the device holds it or the embedding model."""
    client.chat.completions.create(model=SMALL, messages=HELLO, max_tokens=1)
    client.embeddings.create(model=EMBED, input="x")

    def is_asleep() -> bool:
        tickets = graph.state()["tickets"]
        return any(t["model"] == SMALL and t["state"] == "asleep" for t in tickets)

    until(is_asleep, 60, "it sleeps")
