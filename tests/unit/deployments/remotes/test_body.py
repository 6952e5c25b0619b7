"""The body that leaves: made from known fields, with a length, or not at all."""

from typing import Any

import pytest

from deployments.config.remotes_section import CHAT, COMPLETIONS, EMBEDDINGS, RemoteModel
from deployments.remotes.body import BodyStays, rebuild

MODEL = RemoteModel(name="theirs", answer_tokens=50, paths=(CHAT, COMPLETIONS, EMBEDDINGS))
DATA = "data:image/png;base64,AAAA"


def chat(*messages: Any, **more: Any) -> Any:
    return rebuild(CHAT, {"model": "far", "messages": list(messages)} | more, MODEL)


@pytest.mark.spec("J5")
def test_a_conversation_with_tools_and_pictures_is_made_anew() -> None:
    function = {"name": "now", "arguments": "{}"}
    parts = [
        {"type": "text", "text": "what is it?", "stable": True},
        {"type": "image_url", "image_url": {"url": DATA, "detail": "low", "uuid": "kept"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    ]
    call = {"id": "c1", "type": "function", "function": function | {"odd": 1}, "index": 0}
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    made = chat(
        {"role": "system", "content": "be short", "reasoning": "mine"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        tools=[tool | {"stable": True}],
        stream=True,
        max_tokens=7,
    )
    clean = [
        {"type": "text", "text": "what is it?"},
        {"type": "image_url", "image_url": {"url": DATA, "detail": "low"}},
        parts[2],
    ]
    assert made.fields == {
        "model": "theirs",
        "messages": [
            {"role": "system", "content": "be short"},
            {"role": "user", "content": clean},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        ],
        "tools": [tool],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 7,
    }
    assert made.inputs == {"text", "image", "audio"} and made.answer_tokens == 7
    assert 1_600 < made.prompt_tokens < 1_800  # one picture, and few words


@pytest.mark.spec("J5")
@pytest.mark.parametrize(
    ("message", "place"),
    [
        ("words", "messages.0"),
        ({"content": "no role"}, "messages.0.role"),
        ({"role": "user", "content": 7}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "video_url"}]}, "messages.0.content.0"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content.0.text"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": "http://10.0.0.1/a"}]},
            "messages.0.content.0.image_url.url",
        ),
        ({"role": "assistant", "tool_calls": [{"id": 1}]}, "messages.0.tool_calls.0.function"),
    ],
)
def test_what_cannot_be_made_anew_stays(message: Any, place: str) -> None:
    with pytest.raises(BodyStays) as stays:
        chat(message)
    assert stays.value.param == place


def test_what_has_no_bound_stays() -> None:
    message = {"role": "user", "content": "a"}
    with pytest.raises(BodyStays, match="n"):
        chat(message, n=10**9 + 0.5)
    deep: Any = {}
    for _ in range(200):
        deep = {"a": deep}
    with pytest.raises(BodyStays, match="nests deeper"):
        chat(message, response_format=deep)
    with pytest.raises(BodyStays, match="no list of messages"):
        chat()


@pytest.mark.spec("J5")
def test_the_operator_bounds_the_answer_and_each_choice_counts() -> None:
    message = {"role": "user", "content": "a"}
    assert chat(message, max_tokens=10**6).fields["max_tokens"] == 50
    assert chat(message).fields["max_tokens"] == 50
    for name in ("max_tokens", "max_completion_tokens"):
        with pytest.raises(BodyStays, match="no number above 0") as refused:
            chat(message, **{name: 0})
        assert refused.value.param == name
    assert chat(message, n=3, max_completion_tokens=5).answer_tokens == 15
    made = rebuild(COMPLETIONS, {"prompt": ["a", "b"], "best_of": 2}, MODEL)
    assert made.answer_tokens == 50 * 2 * 2
    newer = MODEL.model_copy(update={"length_field": "max_completion_tokens"})
    assert rebuild(COMPLETIONS, {"prompt": "a"}, newer).fields["max_completion_tokens"] == 50


def test_numbers_of_tokens_stay_because_they_are_of_another_vocabulary() -> None:
    for path, name in ((COMPLETIONS, "prompt"), (EMBEDDINGS, "input")):
        with pytest.raises(BodyStays, match=name):
            rebuild(path, {name: [1, 2]}, MODEL)
    made = rebuild(EMBEDDINGS, {"input": ["a", "b"], "user": "me"}, MODEL)
    assert made.fields == {"model": "theirs", "input": ["a", "b"]} and made.answer_tokens == 0
