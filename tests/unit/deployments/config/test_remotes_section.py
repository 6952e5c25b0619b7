"""What a person may write of remotes, and what each mistake is told."""

from typing import Any

import pytest

from deployments.config.schema import ConfigError, parse_table

MODELS = {"far-chat": {"name": "their-chat"}}
ROW = {"url": "https://api.example.com/v1", "models": MODELS, "budget": {"tokens": 1}}
CHAT = {"chat": {"role": "text", "engine": "vllm", "models": {"near-chat": {"source": "a/b"}}}}


def table(row: dict[str, Any], **section: Any) -> Any:
    remotes = {"hosts": ["api.example.com", "127.0.0.1"], "rows": {"cloud": ROW | row}} | section
    return parse_table({"capabilities": CHAT, "remotes": remotes})


@pytest.mark.spec("J5")
def test_a_row_needs_a_url_a_model_and_a_budget() -> None:
    found = table({}).remotes
    assert found.homes == {"far-chat": "cloud"} and not found.nothing_leaves
    row = found.rows["cloud"]
    assert row.endpoint("/v1/chat/completions") == "https://api.example.com/v1/chat/completions"
    assert not row.private_addresses and row.models["far-chat"].inputs == ("text",)
    for name in ("url", "models", "budget"):
        with pytest.raises(ConfigError, match=name):
            table({name: None})


@pytest.mark.spec("J5")
@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"url": "https://other.example.com/v1"}, "not in `remotes.hosts`"),
        ({"url": "http://api.example.com/v1"}, "http only with `private_addresses"),
        ({"url": "https://ann:secret@api.example.com/v1"}, "write it as"),
        ({"url": "https://api.example.com/v1?key=1"}, "write it as"),
        ({"url": "file:///etc/passwd"}, "write it as"),
        ({"url": "ftp://api.example.com/v1"}, "url: https"),
        ({"url": "https://api.example.com/v1/%2e%2e"}, "small letters"),
        ({"key_env": "ARBITER_KEY"}, "a variable of its own"),
        ({"key_env": "sk-a-key-itself"}, "a variable of its own"),
        ({"key": "sk-a-key"}, "Extra inputs"),
        ({"key_env": "A", "key_file": "b"}, "not both"),
        ({"budget": {}}, "`tokens`, `money` or both"),
        ({"models": {"near-chat": {"name": "x"}}}, "both in 'chat' and at the remote 'cloud'"),
        ({"models": {"../far": {"name": "x"}}}, "model name"),
        ({"models": {"task:far": {"name": "x"}}}, "model name"),
        ({"models": {"far": {"name": "x\r\ny: z"}}}, "model name"),
        ({"models": {"far": {"name": "x", "paths": ["/v1/files"]}}}, "paths"),
    ],
)
def test_each_mistake_is_named(row: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        table(row)
    assert said in str(refused.value) and "secret" not in str(refused.value)


def test_patterns_that_are_none_are_refused_before_they_are_needed() -> None:
    for pattern in ("(", "a*"):
        with pytest.raises(ConfigError, match="pattern"):
            table({}, secrets=[pattern])
    twice = {"cloud": ROW, "other": ROW}
    with pytest.raises(ConfigError, match="is in both 'cloud' and 'other'"):
        table({}, rows=twice)
    with pytest.raises(ConfigError, match="small letters, digits"):
        table({}, rows={"A cloud": ROW})
