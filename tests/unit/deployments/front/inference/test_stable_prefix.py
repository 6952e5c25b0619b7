"""Which part of a request is stable, and that its marks are taken out."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.front.inference.stable_prefix import BadMark, stable_run, strip

pytestmark = pytest.mark.spec("G1")

SYSTEM = {"role": "system", "content": "be brief", "stable": True}
USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {}}, "stable": True}


def part(text: str, **mark: bool) -> dict[str, Any]:
    return {"type": "text", "text": text, **mark}


def canonical_bytes(body: dict[str, Any]) -> bytes | None:
    run = stable_run(body)
    return run.canonical if run else None


def canonical(body: dict[str, Any]) -> Any:
    canonical = canonical_bytes(body)
    return None if canonical is None else json.loads(canonical)


def test_run_ends_at_the_first_message_without_a_mark() -> None:
    later = {"role": "user", "content": "again", "stable": True}
    body = {"messages": [SYSTEM, USER, later]}
    assert canonical(body) == {"messages": [{"role": "system", "content": "be brief"}]}
    run = stable_run(body)
    assert run and (run.whole_count, run.parts_count, run.with_tools) == (1, 0, False)


def test_nothing_is_stable_without_a_mark_at_the_beginning() -> None:
    assert stable_run({"messages": [USER, SYSTEM]}) is None
    assert stable_run({"messages": [{**SYSTEM, "stable": False}]}) is None
    assert stable_run({"prompt": "no chat"}) is None


def test_parts_of_a_message_are_segments_of_their_own() -> None:
    mixed = {"role": "user", "content": [part("manual", stable=True), part("question")]}
    run = stable_run({"messages": [SYSTEM, mixed, USER]})
    assert run and (run.whole_count, run.parts_count) == (1, 1)
    kept = json.loads(run.canonical)["messages"]
    assert kept[1] == {"role": "user", "content": [part("manual")]}


def test_a_message_of_stable_parts_only_is_stable_whole() -> None:
    whole = {"role": "system", "content": [part("a", stable=True), part("b", stable=True)]}
    run = stable_run({"messages": [whole, USER]})
    assert run and (run.whole_count, run.parts_count) == (1, 0)


def test_a_picture_ends_the_run() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:"}, "stable": True}
    shown = {"role": "user", "content": [part("look"), picture], "stable": True}
    run = stable_run({"messages": [shown, USER]})
    assert run and (run.whole_count, run.parts_count) == (0, 1)


def test_tools_belong_to_the_run_when_all_are_marked() -> None:
    other = {k: v for k, v in TOOL.items() if k != "stable"}
    assert canonical({"tools": [TOOL], "messages": [USER]}) == {"tools": [other]}
    assert canonical({"tools": [TOOL, other], "messages": [SYSTEM]}).keys() == {"messages"}


def test_equal_content_has_equal_bytes_whatever_follows_and_however_it_is_marked() -> None:
    turned = dict(reversed(SYSTEM.items()))
    first = canonical_bytes({"model": "a", "messages": [SYSTEM, USER]})
    assert first == canonical_bytes({"messages": [turned, USER, USER], "model": "b"})
    parts = {"role": "system", "content": [part("x")], "stable": True}
    each = {"role": "system", "content": [part("x", stable=True)]}
    assert canonical_bytes({"messages": [parts]}) == canonical_bytes({"messages": [each]})


def test_blocks_of_anthropic_and_items_of_responses_may_be_marked() -> None:
    blocks = {"system": [part("rules", stable=True)], "messages": [USER]}
    assert canonical(blocks) == {"system": [part("rules")]}
    assert canonical({"system": "rules", "messages": [SYSTEM]}) is None
    assert canonical({"input": [SYSTEM, USER]}) == {
        "input": [{"role": "system", "content": "be brief"}]
    }


def test_strip_removes_every_mark_and_nothing_else() -> None:
    body = {
        "tools": [copy.deepcopy(TOOL)],
        "messages": [dict(SYSTEM), {"role": "user", "content": [part("x", stable=False)]}],
        "stable": "a field of its own",
    }
    assert strip(body)
    assert body == {
        "tools": [{k: v for k, v in TOOL.items() if k != "stable"}],
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [part("x")]},
        ],
        "stable": "a field of its own",
    }
    assert not strip(body)


@pytest.mark.parametrize("bad", ["true", 1, None, {}])
def test_a_mark_that_is_no_boolean_is_named(bad: object) -> None:
    body = {"messages": [USER, {"role": "user", "content": [{"type": "text", "stable": bad}]}]}
    with pytest.raises(BadMark) as caught:
        strip(body)
    assert caught.value.place == "messages[1].content[0].stable"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["stable", "content", "type", "text", "role"]), inner)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["tools", "system", "messages", "input"]), JSON))
def test_no_body_breaks_either(body: dict[str, Any]) -> None:
    before = copy.deepcopy(body)
    stable_run(body)
    assert body == before
    try:
        strip(body)
    except BadMark:
        return
    assert stable_run(body) is None
