"""What the front makes of stable segments: marks out, and where the stable part ends."""

import json
from typing import Any

import pytest
from starlette.datastructures import Headers

from arbiter.units import DEFAULT_TENANT
from deployments.config.load_plan import plan
from deployments.config.schema import Table, parse_table
from deployments.front.inference.model_names import Target
from deployments.front.inference.request import BadRequest, inference_call, parse
from deployments.messages import InferenceCall
from deployments.requests import prefixes
from deployments.requests.prefixes import CHAT, PrefixEnd, prefix_of

pytestmark = pytest.mark.spec("G1")

SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "hello"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "clock", "parameters": {}}}
NEED = {"weights": 5}


def stable(item: dict[str, Any]) -> dict[str, Any]:
    return {**item, "stable": True}


def table(**model: Any) -> Table:
    one = {"source": "x", "need": NEED, **model}
    return parse_table(
        {"capabilities": {"chat": {"role": "text", "engine": "vllm", "models": {"m": one}}}}
    )


async def call(
    body: dict[str, Any],
    of: Table | None = None,
    path: str = CHAT,
    tenant: str = DEFAULT_TENANT,
    served: str = "m",
) -> InferenceCall:
    of = of or table()
    asked = await parse(path, json.dumps({"model": "m", **body}).encode(), Headers({}), {})
    model = of.capabilities["chat"].models["m"]
    return inference_call(asked, Target("chat", "m", served), model, tenant)


async def cut(*args: Any, **more: Any) -> tuple[int, int, bool] | None:
    stable = (await call(*args, **more)).stable
    return (stable.whole_count, stable.parts_count, stable.with_tools) if stable else None


@pytest.mark.spec("J2")
async def test_marks_do_not_reach_the_engine_and_say_where_the_stable_part_ends() -> None:
    body = {"messages": [stable(SYSTEM), USER], "tools": [stable(TOOL)]}
    made = await call(body)
    assert json.loads(made.body) == {"model": "m", "messages": [SYSTEM, USER], "tools": [TOOL]}
    assert await cut(body) == (1, 0, True)


async def test_body_without_marks_goes_on_unchanged() -> None:
    raw = b'{"model":  "m", "messages": [{"role": "user", "content": "\\"stable\\": true"}]}'
    asked = await parse(CHAT, raw, Headers({}), {})
    model = table().capabilities["chat"].models["m"]
    made = inference_call(asked, Target("chat", "m", "m"), model, DEFAULT_TENANT)
    assert made.body == raw and made.stable is None


async def test_marks_behind_an_unmarked_message_are_taken_out_and_mean_nothing() -> None:
    made = await call({"messages": [USER, stable(SYSTEM)]})
    assert json.loads(made.body)["messages"] == [USER, SYSTEM] and made.stable is None


@pytest.mark.spec("L3")
async def test_wrong_mark_is_refused_by_its_place() -> None:
    with pytest.raises(BadRequest) as caught:
        await call({"messages": [{**USER, "stable": "yes"}]})
    assert caught.value.param == "messages[0].stable"


async def test_blocks_of_anthropic_lose_their_marks_too() -> None:
    block = {"type": "text", "text": "rules", "stable": True}
    body = {"model": "m", "max_tokens": 1, "system": [block], "messages": [USER]}
    asked = await parse("/v1/messages", json.dumps(body).encode(), Headers({}), {})
    assert asked.fields is not None and "stable" not in asked.fields["system"][0]
    assert b"stable" not in asked.raw


async def test_all_of_a_prewarm_without_marks_is_stable() -> None:
    whole = {"messages": [SYSTEM, USER], "tools": [TOOL]}
    assert await cut(whole, path=prefixes.PATH) == (2, 0, True)
    assert await cut({"messages": [stable(SYSTEM), USER]}, path=prefixes.PATH) == (1, 0, False)
    assert await cut({}, path=prefixes.PATH) is None


@pytest.mark.parametrize("tenant", [DEFAULT_TENANT, "acme"])
@pytest.mark.parametrize("adapter", [None, "legal"])
async def test_requests_begin_with_the_declared_prefix(tenant: str, adapter: str | None) -> None:
    """The key that the front sends with a request is that of the plan's prefix."""
    declared = {"system": SYSTEM["content"], "tools": [TOOL], "adapter": adapter, "tenant": tenant}
    of = table(stable_prefixes=[declared], thinking=False, defaults={"temperature": 0})
    served = f"m:{adapter}" if adapter else "m"
    body: dict[str, Any] = {"messages": [SYSTEM, USER], "tools": [TOOL]}
    made = await call(body, of, tenant=tenant, served=served)
    [prefix] = plan("m", of.capabilities["chat"]).prefixes
    assert made.stable is not None and made.stable.key == prefix.key
    again = prefix_of(json.loads(made.body), made.stable, tenant)
    assert json.loads(again.body) == json.loads(prefix.body)
    marked = await call(
        {"messages": [stable(SYSTEM), USER], "tools": [stable(TOOL)]}, table(thinking=False),
        tenant=tenant, served=served,
    )  # fmt: skip
    assert marked.stable == made.stable


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [USER]},
        {"messages": [{**SYSTEM, "content": "be verbose"}, USER]},
        {"tools": [TOOL]},
    ],
)
async def test_request_that_begins_otherwise_has_no_declared_prefix(change: dict[str, Any]) -> None:
    of = table(stable_prefixes=[{"system": SYSTEM["content"]}])
    assert await cut({"messages": [SYSTEM, USER]}, of) == (1, 0, False)
    assert await cut({"messages": [SYSTEM, USER], **change}, of) is None
    assert await cut({"messages": [SYSTEM, USER]}, of, tenant="acme") is None
    assert await cut({"messages": [SYSTEM, USER]}, of, served="m:legal") is None


async def test_longest_declared_prefix_counts() -> None:
    of = table(stable_prefixes=[{"system": "be brief"}, {"messages": [SYSTEM, USER]}])
    assert await cut({"messages": [SYSTEM, USER, USER]}, of) == (2, 0, False)


def test_key_knows_what_the_rendering_depends_on_and_nothing_else() -> None:
    chat = {"model": "m", "messages": [SYSTEM, USER]}
    key = prefix_of(chat, PrefixEnd(1), "t").key
    for same in ({"temperature": 1}, {"messages": [SYSTEM, {**USER, "role": "assistant"}]}):
        assert prefix_of(chat | same, PrefixEnd(1), "t").key == key
    others: list[dict[str, Any]] = [
        {"model": "m:legal"},
        {"cache_salt": "acme"},
        {"tools": [TOOL]},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"messages": [USER, SYSTEM]},
    ]
    keys = {prefix_of(chat | other, PrefixEnd(1), "t").key for other in others}
    assert len(keys | {key}) == len(others) + 1


def test_prefix_names_the_role_that_comes_next() -> None:
    def role(messages: list[Any], whole: int) -> str:
        said = json.loads(prefix_of({"messages": messages}, PrefixEnd(whole), "t").body)
        role: str = said["next_role"]
        return role

    assert role([SYSTEM, USER], 1) == "user"
    assert role([SYSTEM, USER, {"role": "tool", "content": "x"}], 2) == "tool"
    assert role([SYSTEM, USER], 2) == "assistant"
    assert role([SYSTEM], 1) == role([], 0) == "user"
