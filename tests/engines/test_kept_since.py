"""What the router takes for held, against what vLLM finds in its prefix cache and its slab (G3)."""

import time
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest

from arbiter.units import DEFAULT_TENANT, MIB
from deployments.routing.pieces import KeptKv, SeenPieces, SentTime, pieces_of, split
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
TERM_S = 3.0  # of a slab's rows


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


def ask(child: Child, tokens: list[int], most: int = 1, tenant: str = DEFAULT_TENANT) -> int:
    """How many tokens of a prompt it did not compute."""
    body = {"model": "tiny", "prompt": tokens, "max_tokens": most, "ignore_eos": True}
    if tenant != DEFAULT_TENANT:
        body["cache_salt"] = tenant
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
    term_s: float = inf
    seen: SeenPieces = field(default_factory=SeenPieces)

    def send(self, seed: int, most: int = 1, tenant: str = DEFAULT_TENANT) -> int:
        """How many tokens of a prompt the engine did not compute."""
        now_s = time.time()
        self.seen.note("r", "m", _pieces(seed), SentTime(now_s, now_s + self.term_s))
        return ask(self.child, prompt(seed), most, tenant)

    def send_and_store(self, sent: range, tenant: str = DEFAULT_TENANT) -> range:
        """Sends the next prompt and waits until the slab has all of them. Returns what was sent."""
        self.send(sent.stop, tenant=tenant)
        until(lambda: facts(self.child)["stored"] >= (sent.stop + 1) * STORED, 60)
        return range(sent.stop + 1)

    def held(self, seeds: range, tenant: str = DEFAULT_TENANT) -> list[int]:
        """The prompts of which the engine holds enough, as it says of itself."""
        status, said = self.child.call("GET", "/control/health")
        assert status == 200, said
        self.seen.update("r", ["m"], {"m": KeptKv(**said["kept"])})
        shares = {n: self.seen.share("r", "m", _pieces(n), tenant, time.time()) for n in seeds}
        return [n for n, share in shares.items() if share >= HELD_SHARE]


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


def test_what_a_tenant_lost_for_its_cap_counts_as_held_no_more_and_what_others_were_sent_does(
    engines: ZygoteUnderTest, tiny: Path
) -> None:
    with lent_slab(SLAB) as slab:
        given = config(tiny, slab)
        given["slabs"]["kv"]["caps"] = {"acme": 0.2}
        with served(engines, "capped", VLLM, given) as child:
            told = Told(child)
            sent = told.send_and_store(told.send_and_store(range(0)))
            others = len(sent)
            while not told.held(range(1)) == [0] or len(sent) < others + 6:
                sent = told.send_and_store(sent, "acme")
                assert told.held(range(others)) == list(range(others))
            own = range(others, len(sent))
            held = told.held(own, "acme")
            lost = [seed for seed in own if seed not in held]
            assert held and len(lost) >= 2 and held == list(own)[len(lost) :]
            cached = {n: ask(child, prompt(n), tenant="acme") for n in [*held[::-1], *lost]}
            enough = HELD_SHARE * STORED * BLOCK
            assert [n for n in own if cached[n] >= enough] == held, cached
            assert [ask(child, prompt(n)) for n in range(others)] == [STORED * BLOCK] * others


def test_what_the_slab_alone_has_counts_as_held_until_its_term_is_over(
    engines: ZygoteUnderTest, tiny: Path
) -> None:
    with lent_slab(2 * SLAB) as slab:
        given = config(tiny, slab)
        given["slabs"]["kv"]["term_s"] = TERM_S
        with served(engines, "term", VLLM, given) as child:
            told = Told(child, TERM_S)
            told.send(0)
            for seed in range(1, 8):
                told.send(seed)
            ends_s = time.time() + TERM_S
            until(lambda: time.time() > ends_s, 60)
            held = told.held(range(8))
            assert 7 in held and 0 not in held, "the device has the latest"
            assert facts(child)["evicted"] == 0, "as no row was in the way"
            assert ask(child, prompt(7)) == STORED * BLOCK
            assert ask(child, prompt(0)) == 0


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
