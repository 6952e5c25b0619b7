"""A conversation of twenty turns whose engine is killed in the midst of a turn, and the same
uninterrupted: token for token in float32; in bfloat16 bit for bit as a hit on the device."""

import json
from pathlib import Path
from typing import Any

import pytest

from arbiter.units import MIB
from tests.support.engine_host import Child, Connection, ZygoteUnderTest, kill, killed, served
from tests.support.kv_engines import BLOCK, STORED, VLLM, await_rows, config, facts, prompt
from tests.support.slabs import lent_slab

TURNS = 20
KILLED_IN, SLEPT_AFTER = 11, 15
BY_FORM = (6, 13)  # turns whose answers must have a form
FORM = {"regex": "(yes|no), [0-9]{6}"}
SAID, ANSWERED = 60, 16  # tokens of a turn
FIRST_WORDS = 300  # what came before the first turn


def body_of(tokens: list[int], turn: int) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": tokens, "max_tokens": ANSWERED, "temperature": 0}
    if turn in BY_FORM:
        return {**body, "structured_outputs": FORM, "return_token_ids": True}
    return {**body, "ignore_eos": True, "return_token_ids": True}


def answer(child: Child, tokens: list[int], turn: int) -> tuple[list[int], int]:
    """The tokens of one turn, and how many before it were not computed again."""
    status, said = child.call("POST", "/v1/completions", body_of(tokens, turn))
    assert status == 200, said
    cached = said["usage"]["prompt_tokens_details"]["cached_tokens"]
    return said["choices"][0]["token_ids"], cached


def said_by_the_user(turn: int) -> list[int]:
    return prompt(100 + turn, SAID)


def kill_in_the_midst(child: Child, tokens: list[int], turn: int) -> None:
    """Once some of the answer has come."""
    line = Connection(child.path)
    head = {"content-type": "application/json"}
    body = {**body_of(tokens, turn), "stream": True}
    line.request("POST", "/v1/completions", json.dumps(body), head)
    response = line.getresponse()
    assert response.status == 200 and response.readline().startswith(b"data: {")
    kill(child)
    line.close()


@pytest.mark.spec("E1", "E5", "G4", "G7")
def test_conversation_of_twenty_turns_goes_on_token_for_token_after_a_kill_in_the_midst_of_one(
    engines: ZygoteUnderTest, tiny: Path
) -> None:
    with lent_slab(128 * MIB) as slab:
        given = config(tiny, slab)
        with served(engines, "uninterrupted", VLLM, config(tiny, None)) as child:
            expected, tokens = [], prompt(100, FIRST_WORDS)
            for turn in range(TURNS):
                tokens += said_by_the_user(turn)
                expected.append(answer(child, tokens, turn)[0])
                tokens += expected[-1]
        tokens = prompt(100, FIRST_WORDS)
        with killed(engines, "interrupted", VLLM, given) as child:
            for turn in range(KILLED_IN):
                tokens += said_by_the_user(turn)
                assert answer(child, tokens, turn)[0] == expected[turn], turn
                tokens += expected[turn]
            before = len(tokens) // BLOCK
            await_rows(child, before - 1)
            tokens += said_by_the_user(KILLED_IN)
            kill_in_the_midst(child, tokens, KILLED_IN)
        with served(engines, "goes-on", VLLM, given) as child:
            for turn in range(KILLED_IN, TURNS):
                found, cached = answer(child, tokens, turn)
                assert found == expected[turn], turn
                if turn == KILLED_IN:
                    assert cached >= (before - 1) * BLOCK
                if turn == SLEPT_AFTER:
                    assert child.call("POST", "/control/sleep")[0] == 200
                    assert child.call("POST", "/control/wake")[0] == 200
                tokens += [*found, *(said_by_the_user(turn + 1) if turn + 1 < TURNS else [])]
            assert facts(child)["loaded"] >= before - 1


def logprobs(child: Child, tokens: list[int]) -> tuple[Any, int]:
    """An answer with all that is said of its tokens, to the last bit that JSON has."""
    body = {**body_of(tokens, 0), "logprobs": 5}
    status, said = child.call("POST", "/v1/completions", body)
    assert status == 200, said
    choice, usage = said["choices"][0], said["usage"]
    told = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
    return (choice["token_ids"], told), usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.spec("E10", "G4")
def test_restored_blocks_in_bfloat16_answer_bit_for_bit_as_a_hit_on_the_device(
    engines: ZygoteUnderTest, tiny: Path
) -> None:
    with lent_slab(128 * MIB) as slab:
        given = config(tiny, slab, dtype="bfloat16")
        prompts = [prompt(number) for number in (120, 121, 122)]
        with killed(engines, "bf16", VLLM, given) as child:
            for tokens in prompts:
                assert logprobs(child, tokens)[1] == 0
            hits = [logprobs(child, tokens) for tokens in prompts]
            assert {cached for _, cached in hits} == {STORED * BLOCK}
            await_rows(child, len(prompts) * STORED)
        with served(engines, "bf16-next", VLLM, given) as child:
            assert [logprobs(child, tokens) for tokens in prompts] == hits
            assert facts(child)["loaded"] == len(prompts) * STORED
