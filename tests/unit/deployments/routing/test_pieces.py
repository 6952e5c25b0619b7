"""Hashes of a prompt's pieces: equal for as long as two prompts are, of one tenant and adapter."""

import json
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbiter.pool.layout import tenant_digest
from deployments.routing import pieces as module
from deployments.routing.pieces import (
    HASH_BYTES,
    PIECE_CHARACTERS,
    PIECES_OF_A_PROMPT,
    KeptKv,
    SeenPieces,
    SentTime,
    pieces_of,
    split,
)

pytestmark = pytest.mark.spec("G3")
MANUAL = "".join(f"Rule {number}: be exact. " for number in range(400))
WHOLE = len(MANUAL) // PIECE_CHARACTERS
OWNERS = ("acme", "m")


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    roles = ("system", *("user", "assistant") * len(texts))
    said = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return {"model": "m", "messages": said, **more}


def hashes(fields: dict[str, Any], *owners: str) -> list[bytes]:
    return split(pieces_of(fields, *(owners or OWNERS)))


def shared(one: list[bytes], other: list[bytes]) -> int:
    """How many leading hashes are equal; none after these is."""
    same = [a == b for a, b in zip(one, other, strict=False)]
    count = same.index(False) if False in same else len(same)
    assert not any(same[count:])
    return count


def share(seen: SeenPieces, replica: str, model: str, prompt: list[bytes]) -> float:
    return seen.share(replica, model, prompt, "acme", 0.0)


def has_kept(seen: SeenPieces, replica: str, model: str, at_s: float) -> bool:
    return seen.has_kept(replica, model, SentTime(at_s), "acme", 0.0)


def test_prompts_share_the_hashes_of_the_whole_pieces_with_which_both_begin() -> None:
    one, other = hashes(chat(MANUAL, "x" * 3_000)), hashes(chat(MANUAL, "y" * 2_000))
    assert shared(one, other) == WHOLE
    assert len(one) > len(other) > WHOLE > 10
    assert shared(hashes(chat("You are kind. " + MANUAL)), one) == 0


def test_next_turn_begins_with_all_pieces_of_the_last() -> None:
    first = hashes(chat(MANUAL, "And now?"))
    assert shared(first, hashes(chat(MANUAL, "And now?", "Wait." * 500, "Why?"))) == len(first)


def test_no_tenant_and_no_adapter_has_the_hashes_of_another() -> None:
    own = hashes(chat(MANUAL))
    for owners in (("other", "m"), ("acme", "m:law"), ("acm", "em")):
        assert shared(own, hashes(chat(MANUAL), *owners)) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": MANUAL},
        {"prompt": list(range(3_000))},
        {"instructions": MANUAL, "input": "Hello"},
        {"system": [{"type": "text", "text": MANUAL}], "messages": []},
        chat("Hello", tools=[{"type": "function", "function": {"description": MANUAL}}]),
    ],
)
def test_each_api_has_its_prompt_in_pieces(fields: dict[str, Any]) -> None:
    assert len(hashes(fields)) >= WHOLE
    assert shared(hashes(fields), hashes(json.loads(json.dumps(fields, sort_keys=True)))) >= WHOLE


def test_tools_come_before_the_messages_as_templates_write_them() -> None:
    tools = [{"type": "function", "function": {"description": MANUAL}}]
    one, other = hashes(chat("a", tools=tools)), hashes(chat("b" * 900, tools=tools))
    assert shared(one, other) >= WHOLE


def test_short_prompt_has_none_and_a_long_one_no_more_than_the_bound() -> None:
    assert hashes(chat("Hello")) == []
    assert pieces_of({}, *OWNERS) == b""
    huge = pieces_of({"prompt": "word " * 300_000}, *OWNERS)
    assert len(huge) == PIECES_OF_A_PROMPT * HASH_BYTES


def test_nesting_that_a_client_chooses_is_no_error() -> None:
    deep: Any = MANUAL
    for _ in range(100_000):
        deep = [deep]
    assert len(hashes({"input": deep})) >= WHOLE


@given(st.text(min_size=1_200, max_size=1_600), st.lists(st.integers(1, 1_199), max_size=6))
def test_beginning_of_a_prompt_has_the_same_hashes_alone(text: str, cuts: list[int]) -> None:
    """Any text, also such as no encoder takes, and any prefix of it."""
    whole = hashes({"prompt": text})
    for cut in cuts:
        part = hashes({"prompt": text[:cut]})
        assert shared(part, whole) >= cut // PIECE_CHARACTERS


def test_share_counts_what_was_sent_from_the_beginning_on() -> None:
    seen, prompt = SeenPieces(), [b"1", b"2", b"3", b"4"]
    seen.note("a", "m", prompt[:3], SentTime(1.0))
    assert share(seen, "a", "m", prompt) == 0.75
    assert share(seen, "a", "m", [b"0", *prompt]) == 0.0, "the first decides"
    assert share(seen, "a", "n", prompt) == share(seen, "b", "m", prompt) == 0.0
    assert share(seen, "a", "m", []) == 0.0


def test_least_recently_sent_piece_is_forgotten_and_the_tail_of_a_prompt_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PIECES_OF_A_MODEL", 4)
    seen = SeenPieces()
    seen.note("a", "m", [b"1", b"2", b"3"], SentTime(1.0))
    seen.note("a", "m", [b"x", b"y"], SentTime(1.0))
    assert share(seen, "a", "m", [b"1", b"2", b"3"]) == pytest.approx(2 / 3)
    seen.note("a", "m", [b"1"], SentTime(1.0))
    seen.note("a", "m", [b"z"], SentTime(1.0))
    assert share(seen, "a", "m", [b"1", b"2"]) == 0.5
    assert share(seen, "a", "m", [b"x", b"y"]) == 1.0


def test_replica_that_lost_a_model_knows_its_prompts_no_more() -> None:
    seen = SeenPieces()
    seen.note("a", "m", [b"1"], SentTime(1.0))
    seen.note("a", "n", [b"1"], SentTime(1.0))
    seen.update("a", {}, {})  # the model is on its way there
    assert share(seen, "a", "m", [b"1"]) == 1.0
    seen.update("a", {"m": 3, "n": 3}, {})
    seen.update("a", {"m": 1, "n": 3}, {})  # asleep
    assert share(seen, "a", "m", [b"1"]) == 1.0
    seen.update("a", {"n": 3}, {})
    assert (share(seen, "a", "m", [b"1"]), share(seen, "a", "n", [b"1"])) == (0.0, 1.0)


def test_replica_that_left_is_forgotten() -> None:
    seen = SeenPieces()
    seen.note("a", "m", [b"1"], SentTime(1.0))
    seen.update("a", {"m": 3}, {})
    seen.forget_others({"b"})
    assert share(seen, "a", "m", [b"1"]) == 0.0


def test_what_was_sent_before_an_engine_kept_it_counts_no_more_and_what_was_sent_later_does() -> (
    None
):
    seen = SeenPieces()
    seen.note("a", "m", [b"1", b"2"], SentTime(10.0))
    seen.note("a", "m", [b"1", b"3"], SentTime(20.0))
    seen.note("b", "m", [b"1", b"2"], SentTime(10.0))
    seen.update("a", ["m"], {"m": KeptKv(5.0)})
    assert [share(seen, "a", "m", [b"1", piece]) for piece in (b"2", b"3")] == [1.0, 1.0]
    seen.update("a", ["m"], {"m": KeptKv(10.0), "n": KeptKv(99.0)})
    assert [share(seen, "a", "m", [b"1", piece]) for piece in (b"2", b"3")] == [0.5, 1.0]
    assert share(seen, "b", "m", [b"1", b"2"]) == 1.0, "another replica's engine"
    assert [has_kept(seen, "a", "m", at_s) for at_s in (10.0, 10.1)] == [False, True]
    assert has_kept(seen, "b", "m", 0.0)
    seen.update("a", ["m"], {"m": KeptKv(20.0)})
    assert share(seen, "a", "m", [b"1", b"3"]) == 0.0
    seen.note("a", "m", [b"1", b"2"], SentTime(21.0))
    assert share(seen, "a", "m", [b"1", b"2"]) == 1.0, "it was sent anew"


def test_replica_that_keeps_nothing_holds_nothing_whatever_it_is_sent() -> None:
    seen = SeenPieces()
    seen.update("a", ["m"], {"m": KeptKv(inf)})
    seen.note("a", "m", [b"1"], SentTime(10.0))
    assert share(seen, "a", "m", [b"1"]) == 0.0


def test_what_a_replica_has_lost_it_has_not_again_when_an_engine_begins_anew() -> None:
    seen = SeenPieces()
    seen.note("a", "m", [b"1"], SentTime(10.0))
    seen.update("a", ["m"], {"m": KeptKv(20.0)})
    seen.update("a", ["m"], {"m": KeptKv(0.0)})
    seen.update("a", ["m"], {})
    assert share(seen, "a", "m", [b"1"]) == 0.0
    seen.forget_others([])
    seen.note("a", "m", [b"1"], SentTime(10.0))
    assert share(seen, "a", "m", [b"1"]) == 1.0, "all is forgotten of a replica that left"


def test_later_time_of_two_that_are_noted_of_one_prompt_counts() -> None:
    """The router notes a call when it chooses and once more when it is sent, as old as it is."""
    seen = SeenPieces()
    seen.note("a", "m", [b"1"], SentTime(10.0))
    seen.note("a", "m", [b"1"], SentTime(9.0))
    seen.update("a", ["m"], {"m": KeptKv(9.5)})
    assert share(seen, "a", "m", [b"1"]) == 1.0


def test_engine_that_keeps_kv_after_another_kept_none_holds_what_it_is_sent() -> None:
    seen = SeenPieces()
    seen.update("a", ["m"], {"m": KeptKv(inf)})
    seen.update("a", ["m"], {"m": KeptKv(20.0)})
    seen.note("a", "m", [b"1"], SentTime(30.0))
    assert share(seen, "a", "m", [b"1"]) == 1.0
    assert not has_kept(seen, "a", "m", 10.0)


def test_call_that_waited_to_be_sent_is_lost_with_those_as_old() -> None:
    seen = SeenPieces()
    seen.note("a", "m", [b"1"], SentTime(10.0))
    seen.note("a", "m", [b"2"], SentTime(5.0))
    seen.update("a", ["m"], {"m": KeptKv(7.0)})
    assert [share(seen, "a", "m", [piece]) for piece in (b"1", b"2")] == [1.0, 0.0]


def test_what_the_device_has_lost_is_held_by_the_slab_until_the_latest_of_its_terms_is_over() -> (
    None
):
    seen, first, second = SeenPieces(), [b"1", b"2"], [b"1", b"3"]
    seen.note("a", "m", first, SentTime(10.0, 310.0))
    seen.note("a", "m", second, SentTime(20.0, 3_620.0))
    seen.note("a", "m", [b"1"], SentTime(30.0, 330.0))

    def shares(now_s: float) -> list[float]:
        return [seen.share("a", "m", prompt, "acme", now_s) for prompt in (first, second)]

    seen.update("a", ["m"], {"m": KeptKv(5.0, 5.0)})
    assert shares(9_999.0) == [1.0, 1.0], "the device has it"
    seen.update("a", ["m"], {"m": KeptKv(5.0, 40.0)})
    assert [shares(now_s) for now_s in (309.0, 310.0, 3_619.0, 3_620.0)] == [
        [1.0, 1.0], [0.5, 1.0], [0.5, 1.0], [0.0, 0.0],
    ]  # fmt: skip
    assert not seen.has_kept("a", "m", SentTime(20.0, 320.0), "acme", 320.0)
    assert seen.has_kept("a", "m", SentTime(41.0, 341.0), "acme", 342.0), "the device has it"


def test_what_a_tenant_lost_for_its_cap_says_nothing_of_what_others_were_sent() -> None:
    seen = SeenPieces()
    seen.note("a", "m", [b"own"], SentTime(10.0))
    seen.note("a", "m", [b"other"], SentTime(10.0))

    def held() -> list[float]:
        pairs = (([b"own"], "acme"), ([b"other"], "other"))
        return [seen.share("a", "m", prompt, tenant, 50.0) for prompt, tenant in pairs]

    acme = tenant_digest("acme").hex()
    seen.update("a", ["m"], {"m": KeptKv(5.0, 5.0, {acme: 20.0})})
    assert held() == [1.0, 1.0], "the device has it"
    seen.update("a", ["m"], {"m": KeptKv(5.0, 40.0, {acme: 20.0})})
    assert held() == [0.0, 1.0]
    seen.update("a", ["m"], {"m": KeptKv(5.0, 40.0)})
    assert held() == [0.0, 1.0], "an engine that begins anew has not brought it back"
    seen.note("a", "m", [b"own"], SentTime(21.0))
    assert held() == [1.0, 1.0]
