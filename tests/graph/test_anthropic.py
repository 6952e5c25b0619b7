"""Anthropic's official client, unchanged, against the whole graph."""

import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from models.train_vision import QUESTIONS, answer
from tests.graph.conftest import Graph
from tests.support.drawings import FACTS, drawing, uri

if TYPE_CHECKING:  # three seconds of a core, in the one process that runs these tests
    from anthropic import Anthropic

CHAT, EMBED, SEES = "tiny-chat", "all-minilm-l6-v2", "tiny-describe"
TRAINED = (
    "small-chat"  # random weights may write spaces, which every grammar allows, to the last token
)
HELLO: Any = [{"role": "user", "content": "Who holds the memory?"}]
GREEDY = {"temperature": 0}  # which this client's methods do not name
LEND: Any = {
    "name": "lend",
    "description": "Lends a device",
    "strict": True,
    "input_schema": {
        "type": "object",
        "properties": {"device": {"enum": ["cpu", "gpu"]}},
        "required": ["device"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def claude(graph: Graph) -> "Anthropic":
    from anthropic import Anthropic

    return Anthropic(base_url=graph.url, api_key="none", timeout=120, max_retries=0)


@pytest.mark.spec("J1")
def test_message_is_answered_whole_and_streamed_alike(claude: "Anthropic") -> None:
    asked: Any = {"model": CHAT, "max_tokens": 12, "messages": HELLO, "extra_body": GREEDY}
    whole = claude.messages.create(**asked)
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", CHAT)
    assert whole.stop_reason in ("max_tokens", "end_turn")
    assert 0 < whole.usage.output_tokens <= 12
    with claude.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_delta") > 1
    assert [block.to_dict() for block in last.content] == [b.to_dict() for b in whole.content]
    assert last.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.spec("J1")
def test_tokens_are_counted_as_they_are_used_with_and_without_a_system(claude: "Anthropic") -> None:
    for more in ({}, {"system": "Be brief."}):
        count = claude.messages.count_tokens(model=CHAT, messages=HELLO, **more)
        said = claude.messages.create(model=CHAT, max_tokens=1, messages=HELLO, **more)
        assert count.input_tokens == said.usage.input_tokens > 0


@pytest.mark.spec("J1")
def test_beta_routes_and_the_async_client_are_answered(claude: "Anthropic", graph: Graph) -> None:
    said = claude.beta.messages.create(model=CHAT, max_tokens=2, messages=HELLO)
    assert said.usage.output_tokens <= 2
    request = urllib.request.Request(f"{graph.url}/", method="HEAD")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200


@pytest.mark.spec("J1")
async def test_async_client_streams(graph: Graph) -> None:
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(base_url=graph.url, api_key="none", max_retries=0) as claude:
        stream = await claude.messages.create(model=CHAT, max_tokens=4, messages=HELLO, stream=True)
        kinds = [event.type async for event in stream]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"


@pytest.mark.spec("J1")
def test_tool_that_is_named_is_used_with_lawful_input(claude: "Anthropic") -> None:
    said = claude.messages.create(
        model=TRAINED,
        max_tokens=96,
        extra_body=GREEDY,
        messages=HELLO,
        tools=[LEND],
        tool_choice={"type": "tool", "name": "lend"},
    )
    [use] = [block for block in said.content if block.type == "tool_use"]
    assert use.name == "lend"
    assert use.input["device"] in ("cpu", "gpu")
    assert said.stop_reason == "tool_use"


def shown(source: dict[str, str], question: str) -> Any:
    content = [{"type": "image", "source": source}, {"type": "text", "text": question}]
    return [{"role": "user", "content": content}]


def sent(number: int) -> dict[str, str]:
    data = uri(drawing(number)).partition(",")[2]
    return {"type": "base64", "media_type": "image/png", "data": data}


@pytest.mark.spec("J1", "H2")
def test_picture_in_a_message_is_described_whole_and_streamed(claude: "Anthropic") -> None:
    for kind, number in (("describe", 64), ("shape", 100), ("colour", 8)):
        asked: Any = {
            "model": SEES,
            "max_tokens": 16,
            "messages": shown(sent(number), QUESTIONS[kind][1]),
            "extra_body": GREEDY,
        }
        [said] = claude.messages.create(**asked).content
        assert said.type == "text" and said.text.strip() == answer(kind, FACTS[number])
        with claude.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == said.text
    count = claude.messages.count_tokens(model=SEES, messages=asked["messages"])
    assert count.input_tokens > 16  # more than the question's


@pytest.mark.spec("J1", "H2", "L2", "L3")
@pytest.mark.parametrize(
    "source",
    [
        {"type": "url", "url": "https://example.org/x.png"},
        sent(0) | {"media_type": "image/svg+xml"},
        sent(0) | {"data": sent(0)["data"][:40]},
    ],
)
def test_picture_that_is_no_bitmap_itself_is_400_and_named(
    claude: "Anthropic", source: dict[str, str]
) -> None:
    from anthropic import BadRequestError

    with pytest.raises(BadRequestError, match=r"messages\[0\]\.content\[0\]\.source"):
        claude.messages.create(model=SEES, max_tokens=2, messages=shown(source, "which?"))


@pytest.mark.spec("H2", "L3")
def test_picture_for_a_model_without_eyes_is_a_client_error(claude: "Anthropic") -> None:
    from anthropic import BadRequestError

    with pytest.raises(BadRequestError, match=r"multimodal|image"):
        claude.messages.create(model=CHAT, max_tokens=2, messages=shown(sent(0), "which?"))


@pytest.mark.spec("J1", "L3")
def test_errors_are_the_clients_own_classes_and_name_the_field(claude: "Anthropic") -> None:
    from anthropic import BadRequestError, NotFoundError

    with pytest.raises(NotFoundError) as missing:
        claude.messages.create(model="no-such", max_tokens=2, messages=HELLO)
    assert "no-such" in str(missing.value)
    with pytest.raises(NotFoundError, match="/v1/embeddings"):
        claude.messages.create(model=EMBED, max_tokens=2, messages=HELLO)
    for wrong, field in (({"max_tokens": 0}, "max_tokens"), ({"messages": []}, "messages")):
        with pytest.raises(BadRequestError, match=field) as bad:
            claude.messages.create(**{"model": CHAT, "max_tokens": 2, "messages": HELLO} | wrong)
        body: Any = bad.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    with pytest.raises(BadRequestError) as long:
        claude.messages.create(
            model=CHAT, max_tokens=2, messages=[{"role": "user", "content": "word " * 9_000}]
        )
    body = long.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
