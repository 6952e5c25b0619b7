"""What a request needs, and which model can do it."""

from typing import Any

import pytest

from deployments.config.capability_section import CapabilityConfig
from deployments.tasks.fit import Needs, needs_of, served_paths, unfit

CHAT, SPEECH = "/v1/chat/completions", "/v1/audio/speech"
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 40_000}}


def capability(role: str = "text", **said: Any) -> CapabilityConfig:
    models = {"m": {"source": "x", "engine_args": said.pop("engine_args", {})}}
    return CapabilityConfig(role=role, engine="vllm", models=models, **said)


def asks(**fields: Any) -> Needs:
    return needs_of(CHAT, fields, generates=True)


@pytest.mark.spec("J5")
def test_paths_are_those_of_the_table_or_of_the_capabilitys_class() -> None:
    assert CHAT in served_paths(capability())
    assert served_paths(capability("tts")) == {SPEECH}
    assert served_paths(capability(paths=("/v1/ranks",))) == {"/v1/ranks"}
    assert served_paths(capability(**{"class": "elsewhere:Class"})) == frozenset()
    assert served_paths(capability(**{"class": "nowhere"})) == frozenset()
    said = unfit(needs_of(SPEECH, None, generates=False), "m", capability(), None)
    assert said == f"m does not serve {SPEECH}"
    assert unfit(Needs(SPEECH), "m", capability(**{"class": "elsewhere:Class"}), None) is None
    assert unfit(Needs("/v1/acquire"), "m", capability("tts"), None) is None


@pytest.mark.spec("J5")
def test_request_longer_than_a_context_does_not_fit_and_pictures_count_no_letters() -> None:
    words = {"messages": [{"role": "user", "content": "four" * 100}], "max_tokens": 50}
    assert asks(**words).tokens_count == 150
    assert unfit(asks(**words), "m", capability(), 150) is None
    assert "about 150 tokens" in (unfit(asks(**words), "m", capability(), 149) or "")
    parts = [{"type": "text", "text": "four"}, PICTURE]
    shown = asks(messages=[{"role": "user", "content": parts}])
    assert (shown.tokens_count, shown.has_pictures) == (1, True)
    assert needs_of("/v1/completions", {"prompt": [1, 2, 3]}, generates=True).tokens_count == 3
    assert needs_of("/v1/embeddings", {"input": "four" * 9}, generates=False).tokens_count == 0


@pytest.mark.spec("J5")
def test_pictures_and_tools_need_a_model_for_them() -> None:
    shown = Needs(CHAT, has_pictures=True)
    assert unfit(shown, "m", capability(), None) == "m reads no pictures"
    assert unfit(shown, "m", capability("vision"), None) is None
    tools = {"messages": [], "tools": [{"type": "function"}]}
    assert unfit(asks(**tools), "m", capability(), None) == "m does not choose tools"
    assert unfit(asks(**tools, tool_choice="required"), "m", capability(), None) is None
    able = capability(engine_args={"enable_auto_tool_choice": True})
    assert unfit(asks(**tools), "m", able, None) is None


@pytest.mark.spec("J5")
@pytest.mark.parametrize(
    ("path", "tool_choice", "chooses"),
    [
        ("/v1/chat/completions", {"type": "function", "function": {"name": "f"}}, False),
        ("/v1/chat/completions", {"allowed_tools": {"mode": "auto", "tools": []}}, True),
        ("/v1/chat/completions", {"allowed_tools": {"mode": "required", "tools": []}}, False),
        ("/v1/chat/completions", {"allowed_tools": "auto"}, False),
        ("/v1/responses", {"type": "allowed_tools", "mode": "auto", "tools": []}, True),
        ("/v1/messages", {"type": "auto"}, True),
        ("/v1/messages", {"type": "any"}, False),
        ("/v1/messages", {"type": "tool", "name": "f"}, False),
    ],
)
def test_choosing_of_tools_is_understood_as_each_api_writes_it(
    path: str, tool_choice: dict[str, Any], chooses: bool
) -> None:
    asked = {"messages": [], "tools": [{"name": "f"}], "tool_choice": tool_choice}
    assert needs_of(path, asked, generates=True).has_tools is chooses


@pytest.mark.spec("J5")
def test_prewarm_needs_what_its_chat_does() -> None:
    assert needs_of("/v1/prewarm", {}, generates=True).path == CHAT


@pytest.mark.spec("J5", "L3")
def test_how_deep_a_client_nests_and_what_type_it_says_are_no_matter() -> None:
    deep: Any = "four"
    for _ in range(100_000):
        deep = [deep]
    assert needs_of("/v1/completions", {"prompt": deep}, generates=True).tokens_count == 1
    assert not asks(messages=deep).has_pictures
    assert not asks(messages=[{"type": ["image_url"], "content": deep}]).has_pictures
