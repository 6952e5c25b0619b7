"""How the chat model of the default and its adapters learn from examples, and how what they reached
is counted."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import torch

from models.chat_tasks import Example
from models.chat_tokens import IGNORED, PAD, encode

# Batches are padded to one of these lengths, in tokens, so that a step is compiled for a few.
# Longer examples are left out.
LENGTHS = (32, 48, 64, 96, 128, 192)
WARM_UP_STEPS = 50
LEAST_SHARE = 0.02

Schedule = Callable[[int], float]
Look = Callable[[int, float], None]  # given a step and its loss
Batch = tuple[torch.Tensor, torch.Tensor]  # tokens and labels, [examples, tokens]


def batches(tok: Any, dice: Random, drawn: Iterator[Example], size: int) -> Iterator[Batch]:
    """Yields batches of examples of like length, padded at the right, for ever."""
    while True:
        pool = [encode(tok, next(drawn)) for _ in range(size * 16)]
        pool = sorted((e for e in pool if len(e[0]) <= LENGTHS[-1]), key=lambda e: len(e[0]))
        del pool[len(pool) // size * size :]
        starts = list(range(0, len(pool), size))
        dice.shuffle(starts)
        for start in starts:
            yield _padded(pool[start : start + size])


def _padded(rows: list[tuple[list[int], list[int]]]) -> Batch:
    longest = max(len(tokens) for tokens, _ in rows)
    width = next(length for length in LENGTHS if length >= longest)
    ids = torch.full((len(rows), width), PAD)
    labels = torch.full((len(rows), width), IGNORED)
    for number, (tokens, wanted) in enumerate(rows):
        ids[number, : len(tokens)] = torch.tensor(tokens)
        labels[number, : len(wanted)] = torch.tensor(wanted)
    return ids, labels


def fit(
    model: Any,
    feed: Iterator[Batch],
    steps: int,
    optimisers: list[torch.optim.Optimizer],
    *,
    share_at: Schedule | None = None,
    is_compiled: bool = True,
    look: Look,
) -> None:
    """Trains; the optimisers' numbers are fp32, the products bf16 where the processor has AVX-512.
    `share_at` says which share of the optimisers' rates holds at a step, after the warm-up; a
    cosine where nothing is given."""
    share_at = share_at or partial(cosine, steps=steps)
    groups = [group for optimiser in optimisers for group in optimiser.param_groups]
    rates = [group["lr"] for group in groups]
    weights = [weight for group in groups for weight in group["params"]]

    # Without AVX-512 a product takes six times as long in bf16 as in fp32.
    is_bf16 = "AVX512" in torch.backends.cpu.get_cpu_capability()

    def loss_of(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            loss: torch.Tensor = model(input_ids=ids, labels=labels).loss
        return loss

    counted = torch.compile(loss_of, dynamic=False) if is_compiled else loss_of
    for step in range(steps):
        share = min(1.0, (step + 1) / WARM_UP_STEPS) * share_at(step)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * share
        loss = counted(*next(feed))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        look(step, loss.item())


def cosine(step: int, steps: int) -> float:
    """Falls from 1 to 0.02."""
    return LEAST_SHARE + (1 - LEAST_SHARE) * (1 + math.cos(math.pi * step / steps)) / 2


def narrator(name: str, every: int = 50) -> Look:
    """Prints the mean loss of the last steps now and then, with the seconds since its making."""
    began_s, last = time.monotonic(), list[float]()

    def look(step: int, loss: float) -> None:
        last.append(loss)
        if step % every == 0:
            mean = sum(last) / len(last)
            print(f"{name} {step} loss {mean:.4f} {time.monotonic() - began_s:.0f} s", flush=True)
            last.clear()

    return look


@torch.inference_mode()
def answers(model: Any, tok: Any, examples: Iterable[Example]) -> list[str]:
    """What the model says, greedily, in batches of one length."""
    wanted = [encode(tok, replace(e, answer=""))[0][:-1] for e in examples]
    texts: list[str] = [""] * len(wanted)
    by_length: dict[int, list[int]] = {}
    for i, tokens in enumerate(wanted):
        by_length.setdefault(len(tokens), []).append(i)
    for places in by_length.values():
        ids = torch.tensor([wanted[i] for i in places])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=96, do_sample=False
        )
        for i, row in zip(places, out[:, ids.shape[1] :], strict=True):
            texts[i] = tok.decode(row, skip_special_tokens=True)
    return texts


def accuracy(model: Any, tok: Any, examples: list[Example]) -> float:
    said = answers(model, tok, examples)
    return sum(a == e.answer for a, e in zip(said, examples, strict=True)) / len(examples)
