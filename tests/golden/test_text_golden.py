"""What our vLLM child says against transformers, PEFT and vLLM alone: fp32, greedy."""

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

from deployments.config.safetensors_header import linear_shapes
from tests.support.adapters import write
from tests.support.engine_host import ROOT, Child, ZygoteUnderTest, is_gone, until

VLLM = "deployments.engines.vllm.engine:build"
COUNT = 32
# Token ids, so that no tokenizer stands between: short, one block, longer than a block of 128.
PROMPTS = [[7, 300, 12], list(range(100, 180)), [(i * 37) % 2000 + 3 for i in range(200)]]
ADAPTERS = ("a0", "a1", "r32", "r64")  # ranks 8, 16, 32, 64


@pytest.fixture(scope="module")
def catalogue(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for name in ADAPTERS[:2]:
        shutil.copytree(tiny.parent / f"{tiny.name}-adapters" / name, folder / name)
    shapes = {name: shape for name, shape in linear_shapes(tiny).items() if "_proj" in name}
    for rank in (32, 64):
        write(folder / f"r{rank}", shapes, rank)
    return folder


def loaded(engines: ZygoteUnderTest, model: Path, catalogue: Path, dtype: str) -> Child:
    """As many slots as adapters: the stock CPU kernel gives a base request the last slot's."""
    args = {"dtype": dtype, "kv_cache_memory_bytes": 64 << 20, "max_model_len": 1024}
    adapters = {"folder": str(catalogue), "store": str(engines.folder / "store"), "max_rank": 64}
    config = {
        "model": str(model),
        "served_name": "base",
        "engine_args": args,
        "adapters": {**adapters, "slots": len(ADAPTERS), "wait_s": 30.0},
    }
    child = engines.spawn(f"golden-{dtype}", VLLM, config).hold()
    status, body = child.ready()
    assert status == 200, body
    return child


@pytest.fixture(scope="module")
def ours(engines: ZygoteUnderTest, tiny: Path, catalogue: Path) -> Iterator[Child]:
    child = loaded(engines, tiny, catalogue, "float32")
    yield child
    child.let_go()
    until(lambda: is_gone(child.pid), 5)


def tokens(child: Child, name: str, prompt: list[int]) -> list[int]:
    body = {"model": name, "prompt": prompt, "max_tokens": COUNT, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    status, got = child.call("POST", "/v1/completions", body)
    assert status == 200, got
    found: list[int] = got["choices"][0]["token_ids"]
    return found


def greedy(network: Any, prompt: list[int]) -> list[int]:
    """One request alone, by transformers."""
    with torch.inference_mode():
        got = network.generate(
            torch.tensor([prompt]), max_new_tokens=COUNT, min_new_tokens=COUNT, do_sample=False
        )
    found: list[int] = got[0, len(prompt) :].tolist()
    return found


@pytest.mark.spec("F10")
def test_tokens_equal_transformers(ours: Child, tiny: Path) -> None:
    network = LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    network.generation_config.eos_token_id = None
    for prompt in PROMPTS:
        assert tokens(ours, "base", prompt) == greedy(network, prompt)


@pytest.mark.spec("F10")
def test_tokens_equal_plain_vllm(ours: Child, tiny: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("plain_vllm.py")), str(tiny)]
    command += [json.dumps(PROMPTS), str(COUNT)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False
    )
    line = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert line, done.stderr[-2000:]
    assert [tokens(ours, "base", prompt) for prompt in PROMPTS] == json.loads(line[0][7:])


@pytest.mark.spec("F10")
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_equals_peft(ours: Child, tiny: Path, catalogue: Path, adapter: str) -> None:
    network = LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    wrapped = PeftModel.from_pretrained(network, str(catalogue / adapter)).float()
    wrapped.generation_config.eos_token_id = None
    for prompt in PROMPTS:
        assert tokens(ours, adapter, prompt) == greedy(wrapped, prompt)


def merged(engines: ZygoteUnderTest, model: Path, adapter: Path, dtype: str) -> Child:
    """A copy of the base with the adapter in its weights, served under the adapter's name."""
    args = {"dtype": dtype, "kv_cache_memory_bytes": 64 << 20, "max_model_len": 1024}
    config = {"model": str(model), "served_name": f"base:{adapter.name}", "merged": str(adapter)}
    child = engines.spawn(f"merged-{dtype}", VLLM, config | {"engine_args": args}).hold()
    status, body = child.ready()
    assert status == 200, body
    return child


@pytest.mark.spec("F7", "F10")
def test_an_adapter_merged_into_a_copy_equals_itself_in_a_slot(
    engines: ZygoteUnderTest, ours: Child, tiny: Path, catalogue: Path
) -> None:
    child = merged(engines, tiny, catalogue / "r64", "float32")
    for prompt in PROMPTS:
        in_slot = tokens(ours, "r64", prompt)
        assert tokens(child, "base:r64", prompt) == in_slot != tokens(ours, "base", prompt)
    child.let_go()


@pytest.mark.spec("F1", "F10")
def test_a_mixed_batch_equals_each_alone(ours: Child) -> None:
    names = ("base", *ADAPTERS, "base", *reversed(ADAPTERS))
    asks = [(name, prompt) for prompt in PROMPTS for name in names]
    alone = [tokens(ours, *ask) for ask in asks]
    assert len({tuple(found) for found in alone}) == len(PROMPTS) * (1 + len(ADAPTERS))
    with ThreadPoolExecutor(len(asks)) as pool:
        mixed = list(pool.map(lambda ask: tokens(ours, *ask), asks))
    assert mixed == alone


# The kernel is held to 1.6e-2 in bf16, and a token passes it several times a layer. On the CPU
# build the two did not differ at all over 480 steps.
BF16_BOUND = 0.1
# Two libraries round after other operations: over 480 steps by 0.14 at most, 0.023 on average.
PEFT_BOUND, PEFT_MEAN = 0.3, 0.075
LIKELIEST = 10  # tokens told of a step: more than ever tie, of which either run may choose another
Steps = list[dict[str, float]]


def ranked(child: Child, name: str, prompt: list[int]) -> Steps:
    """Of each step the likeliest tokens with their logprobs, the likeliest first."""
    body = {"model": name, "prompt": prompt, "max_tokens": COUNT, "temperature": 0}
    body |= {"logprobs": LIKELIEST, "ignore_eos": True, "return_tokens_as_token_ids": True}
    status, got = child.call("POST", "/v1/completions", body)
    assert status == 200, got
    steps: Steps = got["choices"][0]["logprobs"]["top_logprobs"]
    return [dict(sorted(step.items(), key=lambda row: -row[1])) for step in steps]


@pytest.mark.spec("F7", "F10")
def test_mixed_batch_in_bf16_equals_each_alone_and_peft(
    engines: ZygoteUnderTest, tiny: Path, catalogue: Path
) -> None:
    child = loaded(engines, tiny, catalogue, "bfloat16")
    asks = [(name, prompt) for prompt in PROMPTS for name in ("base", *ADAPTERS)]
    alone = [ranked(child, *ask) for ask in asks]
    with ThreadPoolExecutor(len(asks)) as pool:
        mixed = list(pool.map(lambda ask: ranked(child, *ask), asks))
    assert near(alone, mixed) >= len(asks) * 2
    apart = [abs(ours - peft) for ours, peft in by_peft(tiny, catalogue, asks, alone)]
    assert max(apart) <= PEFT_BOUND and sum(apart) / len(apart) <= PEFT_MEAN
    copy = merged(engines, tiny, catalogue / "r64", "bfloat16")
    slots = [steps for (name, _), steps in zip(asks, alone, strict=True) if name == "r64"]
    assert near(slots, [ranked(copy, "base:r64", prompt) for prompt in PROMPTS]) >= len(PROMPTS) * 2
    for engine in (child, copy):
        engine.let_go()


def by_peft(
    model: Path, catalogue: Path, asks: list[tuple[str, list[int]]], told: list[Steps]
) -> Iterator[tuple[float, float]]:
    """Of each step the logprob of its likeliest token, as our engine told it and by PEFT in bf16,
    which is given the tokens before it, each request alone."""
    network = LlamaForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    first, *others = ADAPTERS
    wrapped: Any = PeftModel.from_pretrained(network, str(catalogue / first), first)
    for name in others:
        wrapped.load_adapter(str(catalogue / name), name)
    wrapped.to(torch.bfloat16)
    for (name, prompt), steps in zip(asks, told, strict=True):
        said = [next(iter(step.items())) for step in steps]
        tokens = torch.tensor([int(token.removeprefix("token_id:")) for token, _ in said])
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            if name == "base":
                stack.enter_context(wrapped.disable_adapter())
            else:
                wrapped.set_adapter(name)
            logits = wrapped(torch.cat([torch.tensor(prompt), tokens])[None]).logits[0]
        known = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
        found = known.gather(1, tokens[:, None])[:, 0].tolist()
        yield from zip([ours for _, ours in said], found, strict=True)


def near(ones: list[Steps], others: list[Steps]) -> int:
    """How many steps were compared, each up to its request's first near-tie."""
    compared = 0
    for lone, beside in zip(ones, others, strict=True):
        for one, other in zip(lone, beside, strict=True):
            (token, best), (_, second), *_ = one.items()
            assert abs(best - other.get(token, -100.0)) <= BF16_BOUND
            compared += 1
            if best - second <= BF16_BOUND:
                break  # from here on either is right, and what follows differs
            assert next(iter(other)) == token
    return compared
