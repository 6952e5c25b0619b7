"""Ollama's fields as OpenAI's, and what is refused."""

import base64
from typing import Any

import pytest
from pydantic import ValidationError

from deployments.front.inference.schemas import STAY_WARM_MOST_S
from deployments.front.ollama import bodies


def chat(**more: Any) -> dict[str, Any]:
    asked = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": False}
    return bodies.Chat.model_validate(asked | more).openai()


@pytest.mark.spec("J1")
def test_options_become_openais_fields_and_the_rest_is_left_out() -> None:
    options = {"temperature": 0.5, "num_predict": 7, "repeat_penalty": 1.1, "num_ctx": 99}
    found = chat(options=options | {"stop": ["a"], "seed": 3})
    assert found == {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "temperature": 0.5,
        "max_tokens": 7,
        "repetition_penalty": 1.1,
        "stop": ["a"],
        "seed": 3,
    }
    assert "max_tokens" not in chat(options={"num_predict": -1})
    assert chat(stream=True)["stream_options"] == {"include_usage": True}


@pytest.mark.spec("J1")
@pytest.mark.parametrize("truncate", [None, True, False])
def test_texts_to_embed_are_cut_to_the_models_context_unless_that_is_refused(
    truncate: bool | None,
) -> None:
    found = bodies.Embed.model_validate({"model": "m", "input": "x", "truncate": truncate})
    cut = {} if truncate is False else {"truncate_prompt_tokens": -1}
    assert found.openai() == {"model": "m", "input": "x"} | cut


@pytest.mark.spec("J1")
def test_pictures_of_a_raw_prompt_are_refused_and_not_left_out() -> None:
    asked = {"model": "m", "prompt": "x", "images": ["iVBOR"]}
    with pytest.raises(ValidationError, match="raw text has no place for `images`"):
        bodies.Generate.model_validate(asked | {"raw": True})
    assert bodies.Generate.model_validate(asked | {"raw": True, "images": []}).raw
    assert bodies.Generate.model_validate(asked).images
    with pytest.raises(ValidationError, match="raw text has no place for `logprobs`"):
        bodies.Generate.model_validate(asked | {"raw": True, "images": [], "logprobs": True})


@pytest.mark.spec("J1")
def test_probabilities_of_tokens_are_asked_for_as_openai_has_it() -> None:
    assert chat(logprobs=True).items() >= {"logprobs": True, "top_logprobs": 0}.items()
    assert chat(logprobs=True, top_logprobs=3)["top_logprobs"] == 3
    assert "logprobs" not in chat(logprobs=False) and "top_logprobs" not in chat(top_logprobs=3)


@pytest.mark.spec("J1")
def test_result_of_a_tool_answers_the_call_that_it_names() -> None:
    names = ("lend", "free", "lend")
    calls = [{"function": {"name": name, "arguments": {}}} for name in names]
    said: list[dict[str, Any]] = [{"role": "assistant", "tool_calls": calls}]
    said += [{"role": "tool", "tool_name": name} for name in ("free", "lend", "lend", "lend")]
    called, *results = chat(messages=[*said, {"role": "tool"}])["messages"]
    ids = [call["id"] for call in called["tool_calls"]]
    assert [one["tool_call_id"] for one in results] == [ids[1], ids[0], ids[2], ids[0], ids[0]]
    unnamed = chat(messages=[said[0], *[{"role": "tool"}] * 3])["messages"][1:]
    assert [one["tool_call_id"] for one in unnamed] == ids


@pytest.mark.spec("J1", "L3")
def test_each_call_of_a_tool_is_passed_once_however_many_results_there_are() -> None:
    class Name(str):
        """Counts how often it is compared."""

        __slots__ = ()
        compared_count = 0
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            Name.compared_count += 1
            return str.__eq__(self, other)

    calls = [bodies.ToolCall(function=bodies.ToolFunction(name="a"))] * 100
    asked = bodies.Message(role="assistant", tool_calls=calls)
    for call in calls:
        call.function.name = Name("a")
    results = [bodies.Message(role="tool") for _ in range(5_000)]
    for result in results:
        result.tool_name = Name("b")
    converted = bodies.as_openai([*[asked] * 50, *results])
    ids = [one["tool_call_id"] for one in converted[50:]]
    assert ids == [f"call_{number}" for number in range(5_000)]
    assert Name.compared_count < 30_000


@pytest.mark.spec("J1", "J2")
@pytest.mark.parametrize(
    ("given", "seconds"),
    [("5m", 300.0), ("1h30m", 3_600.0), ("90s", 90.0), ("1500ms", 1.5), (7, 7.0), ("7", 7.0),
     (0, 0.0), (-1, STAY_WARM_MOST_S), ("-1m", STAY_WARM_MOST_S), ("24h", STAY_WARM_MOST_S),
     (10**400, STAY_WARM_MOST_S), (-(10**400), STAY_WARM_MOST_S)],
)  # fmt: skip
def test_keep_alive_is_stay_warm_of_at_most_an_hour(given: object, seconds: float) -> None:
    assert chat(keep_alive=given)["x_stay_warm"] == seconds


@pytest.mark.spec("J1")
def test_formats_thinking_tools_and_pictures_are_translated() -> None:
    schema = {"type": "object"}
    assert chat(format=schema)["response_format"]["json_schema"]["schema"] == schema
    assert chat(format="json")["response_format"] == {"type": "json_object"}
    assert chat(think=False)["chat_template_kwargs"] == {"enable_thinking": False}
    image = base64.b64encode(bytes.fromhex("89504e470d0a1a0a") + b"...").decode()
    said = [
        {"role": "user", "content": "which?", "images": [image]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "two", "tool_name": "f"},
    ]
    asked, called, result = chat(messages=said, tools=[{"type": "function"}])["messages"]
    assert asked["content"] == [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
        {"type": "text", "text": "which?"},
    ]
    [call] = called["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert result["tool_call_id"] == call["id"]


@pytest.mark.spec("J1")
def test_generate_is_a_chat_of_one_message_and_raw_is_a_completion() -> None:
    asked = {"model": "m", "prompt": "x", "system": "s", "stream": False}
    found = bodies.Generate.model_validate(asked).openai()
    assert found["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "x"},
    ]
    raw = bodies.Generate.model_validate(asked | {"raw": True}).openai()
    assert raw == {"model": "m", "prompt": "x"}


@pytest.mark.spec("J1")
def test_field_that_is_null_is_absent() -> None:
    call = {"function": {"name": "f", "arguments": None}}
    said = {"role": "user", "content": None, "images": None, "tool_calls": [call]}
    given = dict.fromkeys(("stream", "options", "format", "tools", "keep_alive", "think"))
    asked = bodies.Chat.model_validate({"model": "m", "messages": [said], **given})
    assert asked.stream and asked.messages[0].content == ""
    assert bodies.Chat.model_validate({"model": "m", "messages": None}).messages == []
    assert bodies.Generate.model_validate({"model": "m", "prompt": None, "raw": None}).prompt == ""


@pytest.mark.spec("J1", "L3")
@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        (bodies.Chat, {}, "model"),
        (bodies.Chat, {"model": ""}, "model"),
        (bodies.Chat, {"model": "m", "messages": [{"role": "unknown"}]}, "messages"),
        (bodies.Chat, {"model": "m", "keep_alive": "soon"}, "keep_alive"),
        (bodies.Chat, {"model": "m", "keep_alive": "5 m"}, "keep_alive"),
        (bodies.Chat, {"model": "m", "keep_alive": float("nan")}, "keep_alive"),
        (bodies.Chat, {"model": "m", "keep_alive": "1" * bodies.SPAN_MOST + "x"}, "keep_alive"),
        (bodies.Chat, {"model": "m", "keep_alive": "1" * 50_000 + "x"}, "keep_alive"),
        (bodies.Chat, {"model": "m", "keep_alive": "9" * 50_000}, "keep_alive"),
        (bodies.Chat, {"model": "m", "format": "xml"}, "format"),
        (bodies.Chat, {"model": "m", "top_logprobs": 21}, "top_logprobs"),
        (bodies.Chat, {"model": "m", "options": {"num_predict": "x"}}, "options.num_predict"),
        (bodies.Chat, {"model": "m", "options": {"stop": ["x"] * 17}}, "options.stop"),
        (bodies.Generate, {"model": "m", "prompt": "x", "suffix": "y"}, "suffix"),
        (bodies.Generate, {"model": "m", "prompt": "x", "template": "y"}, "template"),
        (bodies.Embed, {"model": "m"}, "input"),
        (bodies.Embed, {"model": "m", "input": []}, "input"),
    ],
)
def test_bad_field_is_named(kind: Any, body: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    place = caught.value.errors()[0]["loc"]
    assert [*place[: field.count(".") + 1]] == field.split(".")


@pytest.mark.spec("J1", "J5")
def test_extension_fields_go_on_and_other_unknown_fields_do_not() -> None:
    ours = {"x_local_only": True, "x_deadline_s": 1, "x_priority": "low", "x_client_id": "a"}
    given = ours | {"model": "m", "odd": 1, "x_prefix_id": None}
    chat = bodies.Chat.model_validate(given | {"stream": False})
    assert chat.openai() == ours | {"model": "m", "messages": []}
    assert chat.common() == ours | {"model": "m"}
    generate = bodies.Generate.model_validate(given | {"prompt": "x", "raw": True})
    assert generate.openai().items() >= ours.items()
    embed = bodies.Embed.model_validate(given | {"input": "x", "keep_alive": 7})
    wanted = ours | {"model": "m", "input": "x", "x_stay_warm": 7, "truncate_prompt_tokens": -1}
    assert embed.openai() == wanted
