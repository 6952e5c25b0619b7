"""Pictures described with the shipped configuration, by OpenAI's own client."""

import base64
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from models.train_vision import QUESTIONS, answer
from tests.graph.conftest import Graph, until
from tests.support.drawings import FACTS, drawing, uri

MODEL, CHAT, DRAW = "tiny-describe", "tiny-chat", "tiny-draw"
NUMBERS = range(0, len(FACTS), 16)
SVG = '<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'


def sent(number: int, form: str = "PNG") -> str:
    return uri(drawing(number), form)


def messages(url: str, question: str = QUESTIONS["describe"][1], **more: Any) -> Any:
    part = {"type": "image_url", "image_url": {"url": url}, **more}
    return [{"role": "user", "content": [{"type": "text", "text": question}, part]}]


def told(client: OpenAI, url: str, question: str = QUESTIONS["describe"][1], **more: Any) -> str:
    said = client.chat.completions.create(
        model=MODEL, messages=messages(url, question, **more), temperature=0, max_tokens=16
    )
    assert said.choices[0].finish_reason == "stop"  # it ends by itself
    return (said.choices[0].message.content or "").strip()


@pytest.mark.spec("H2", "J1", "M1")
def test_drawings_are_described_and_questions_about_them_answered(client: OpenAI) -> None:
    answers = [told(client, sent(n, "JPEG" if n % 3 else "PNG")) for n in NUMBERS]
    wanted = [answer("describe", FACTS[n]) for n in NUMBERS]
    assert sum(a == b for a, b in zip(answers, wanted, strict=True)) >= len(wanted) - 1
    for kind in ("shape", "colour", "background"):
        question = QUESTIONS[kind][-1]
        assert told(client, sent(100), question) == answer(kind, FACTS[100])


@pytest.mark.spec("H2", "H5", "M1")
def test_what_is_drawn_is_described_in_the_words_in_which_it_was_asked_for(client: OpenAI) -> None:
    """No two prompts are alike in shape or colours, so that a description of another picture, or of
    none, is wrong."""
    prompts = [fact.caption for fact in FACTS[::32]]

    def drawn(prompt: str) -> str:
        [made] = client.images.generate(model=DRAW, prompt=prompt, extra_body={"x_seed": 1}).data
        return f"data:image/png;base64,{made.b64_json}"

    found = [told(client, drawn(prompt)) for prompt in prompts]
    assert len(set(prompts)) == len(prompts) == 7
    right = [prompt == said for prompt, said in zip(prompts, found, strict=True)]
    assert sum(right) >= len(prompts) - 1, found


@pytest.mark.spec("H2", "J3")
def test_description_streams(client: OpenAI) -> None:
    """Pieces that a busy machine is late for come as one, so that it may take more than one try."""
    whole = told(client, sent(8))

    def comes_in_pieces() -> bool:
        stream = client.chat.completions.create(
            model=MODEL, messages=messages(sent(8)), temperature=0, max_tokens=16, stream=True
        )
        pieces = [c.choices[0].delta.content or "" for c in stream if c.choices]
        assert "".join(pieces).strip() == whole
        return len(pieces) > 2

    until(comes_in_pieces, 60, "the description comes in pieces")


@pytest.mark.spec("H8", "L2")
def test_forged_uuid_gets_the_answer_of_its_own_picture(client: OpenAI) -> None:
    first, other = told(client, sent(0)), told(client, sent(200))
    assert first != other
    assert told(client, sent(0), uuid="mine") == first
    assert told(client, sent(200), uuid="mine") == other


@pytest.mark.spec("H2", "L2", "L3")
@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/x.png",
        "https://example.org/x.png",
        "file:///etc/passwd",
        "data:image/svg+xml;base64," + base64.b64encode(SVG.encode()).decode(),
        "data:image/png;base64," + base64.b64encode(SVG.encode()).decode(),
        sent(0)[:100],
    ],
)
def test_what_is_no_bitmap_is_400_and_names_the_part(client: OpenAI, url: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        told(client, url)
    assert caught.value.param == "messages[0].content[1].image_url"


@pytest.mark.spec("H2", "L3")
def test_truncated_picture_is_400_and_harms_no_other(client: OpenAI) -> None:
    whole = sent(9)
    with pytest.raises(BadRequestError) as caught:
        told(client, whole[: len(whole) * 3 // 4 // 4 * 4])
    assert "image_url" in (caught.value.param or "")
    assert told(client, whole)


@pytest.mark.spec("H2", "L3")
def test_picture_for_a_model_without_eyes_is_a_client_error(graph: Graph, client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match=r"multimodal|image"):
        client.chat.completions.create(model=CHAT, messages=messages(sent(0)), max_tokens=2)
    with pytest.raises(NotFoundError):
        client.embeddings.create(model=MODEL, input="x")
