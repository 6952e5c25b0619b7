"""What the router takes for held, against what vLLM finds in its prefix cache and its slab (G3)."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from arbiter.units import MIB
from deployments.routing.pieces import SeenPieces, pieces_of, split
from deployments.routing.rank import HELD_SHARE
from tests.support.engine_host import Child, ZygoteUnderTest, served, until
from tests.support.slabs import lent_slab, path_of

pytestmark = pytest.mark.spec("G3")
SMALL = 16 * MIB  # of cache on the device
SLAB = 64 * MIB
VLLM = "deployments.engines.vllm.engine:build"
BLOCK = 128  # tokens, of the CPU build
LONG = 1_300  # tokens of a prompt: ten blocks and a part of one
STORED = LONG // BLOCK


def prompt(seed: int) -> list[int]:
    return [Random(seed * 10_000 + place).randrange(10, 2000) for place in range(LONG)]


def config(model: Path, slab: int | None = None, **more: Any) -> dict[str, Any]:
    args = {
        "dtype": "float32",
        "kv_cache_memory_bytes": SMALL,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        **more,
    }
    given: dict[str, Any] = {"model": str(model), "served_name": "tiny", "engine_args": args}
    return given if slab is None else given | {"slabs": {"kv": {"path": path_of(slab)}}}


def ask(child: Child, tokens: list[int], most: int = 1) -> int:
    """How many tokens of a prompt it did not compute."""
    body = {"model": "tiny", "prompt": tokens, "max_tokens": most, "ignore_eos": True}
    status, answer = child.call("POST", "/v1/completions", body)
    assert status == 200, answer
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def facts(child: Child) -> dict[str, int]:
    status, said = child.call("GET", "/slab")
    assert status == 200, said
    found: dict[str, int] = said["kv"]
    return found


@dataclass
class Told:
    """An engine, and what a router knows of it."""

    child: Child
    seen: SeenPieces = field(default_factory=SeenPieces)

    def send(self, seed: int, most: int = 1) -> int:
        """How many tokens of a prompt the engine did not compute."""
        self.seen.note("r", "m", _pieces(seed), time.time())
        return ask(self.child, prompt(seed), most)

    def send_and_store(self, sent: range) -> range:
        """Sends the next prompt and waits until the slab has all of them. Returns what was sent."""
        self.send(sent.stop)
        until(lambda: facts(self.child)["stored"] >= (sent.stop + 1) * STORED, 60)
        return range(sent.stop + 1)

    def held(self, seeds: range) -> list[int]:
        """The prompts of which the engine holds enough, as it says of itself."""
        status, said = self.child.call("GET", "/control/health")
        assert status == 200, said
        self.seen.told("r", ["m"], {"m": said["kept_since_s"]})
        return [n for n in seeds if self.seen.share("r", "m", _pieces(n)) >= HELD_SHARE]


def _pieces(seed: int) -> list[bytes]:
    return split(pieces_of({"prompt": prompt(seed)}, "t", "m"))


def _check(told: Told, sent: range) -> tuple[list[int], list[int]]:
    """The prompts that count as held and those that do not, all of which the engine confirms. It
    is asked for the held ones first, the latest first, because it then evicts what is lost."""
    held = told.held(sent)
    lost = [seed for seed in sent if seed not in held]
    cached = {seed: ask(told.child, prompt(seed)) for seed in [*held[::-1], *lost]}
    enough = HELD_SHARE * STORED * BLOCK
    assert [seed for seed in sent if cached[seed] >= enough] == held, cached
    return held, lost


def test_what_the_engine_evicted_counts_as_held_no_more_and_what_it_has_does(
    engines: ZygoteUnderTest, tiny: Path
) -> None:
    with served(engines, "kept", VLLM, config(tiny)) as child:
        told = Told(child)
        told.send(0)
        assert told.held(range(1)) == [0]
        for seed in range(1, 8):
            assert told.send(seed) == 0
        held, lost = _check(told, range(8))
        assert len(held) >= 2 and len(lost) >= 2


def test_answers_and_prompts_that_the_router_knows_nothing_of_evict_too(
    engines: ZygoteUnderTest, tiny: Path
) -> None:
    with served(engines, "told", VLLM, config(tiny)) as child:
        told = Told(child)
        told.send(0)
        told.send(1, most=5 * BLOCK)
        assert told.held(range(2)) == [0, 1]
        ask(child, prompt(9), 5 * BLOCK)  # another front's
        assert _check(told, range(2)) == ([1], [0])


def test_prompt_that_is_used_again_stays_held_while_others_are_evicted(
    engines: ZygoteUnderTest, tiny: Path
) -> None:
    with served(engines, "used", VLLM, config(tiny)) as child:
        told = Told(child)
        told.send(0)
        for seed in range(1, 7):
            told.send(seed)
            assert told.send(0) == STORED * BLOCK
        held, lost = _check(told, range(7))
        assert 0 in held and 1 in lost


def test_what_lies_in_the_slab_still_counts_as_held_until_that_has_evicted_it(
    engines: ZygoteUnderTest, tiny: Path
) -> None:
    with lent_slab(SLAB) as slab:
        given = config(tiny, slab)
        with served(engines, "slab", VLLM, given) as child:
            told, sent = Told(child), range(0)
            while facts(child)["evicted"] == 0:
                assert told.held(sent) == list(sent)
                sent = told.send_and_store(sent)
            assert len(sent) > 5, "the slab has more than the device"
            for _ in range(3):
                sent = told.send_and_store(sent)
            held, lost = _check(told, sent)
            assert len(held) > 4 and len(lost) >= 3


def test_after_a_sleep_nothing_counts_as_held(engines: ZygoteUnderTest, tiny: Path) -> None:
    with served(engines, "slept", VLLM, config(tiny)) as child:
        told = Told(child)
        told.send(0)
        for act in ("sleep", "wake"):
            assert child.call("POST", f"/control/{act}")[0] == 200
        assert _check(told, range(1)) == ([], [0])


def test_engine_without_a_prefix_cache_holds_nothing(engines: ZygoteUnderTest, tiny: Path) -> None:
    given = config(tiny, enable_prefix_caching=False)
    with served(engines, "without", VLLM, given) as child:
        told = Told(child)
        told.send(0)
        assert _check(told, range(1)) == ([], [0])
