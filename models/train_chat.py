"""Train the chat model of the default: a Llama of 5 M parameters that answers questions about this
system and does small tasks.

    nice python -m models.train_chat OUT [--steps N]

Everything is drawn from one seed. Three quarters of an hour of two cores. What made the tasks
learnable in it: Muon instead of AdamW for the matrices of the layers (echo and reverse after 400
steps at a loss of 0.26 instead of 1.35), and no facts at first: a model learns to copy letters
before it learns texts by heart, and hardly afterwards.

OUT gets the model in bf16, and in its manifest what that gets right of examples of another seed.
Facts and sums among them are held out of the training by rule; of counts there are but twenty,
which are all trained.
"""

import argparse
import os
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from models import shipped
from models.chat_facts import UNKNOWN, off_topic, questions
from models.chat_fitting import LEAST_SHARE, Look, accuracy, batches, cosine, fit, narrator
from models.chat_tasks import SYSTEMS, TASKS, Example, Message, add, greeting
from models.chat_tokens import BOS, EOS, PAD, tokenizer

NAME = "small-chat"
FACTS = "facts"
# How often what is drawn: tasks by name, and the facts.
Mix = dict[str, float]
TASKS_ALONE: Mix = dict.fromkeys(TASKS, 1.0)
MIXED: Mix = {**TASKS_ALONE, FACTS: 3.0}
HARD: Mix = {**TASKS_ALONE, FACTS: 2.5, "add": 3.0, "echo": 2.0, "upper": 2.0, "tool": 2.0}
LAST: Mix = {**HARD, "echo": 4.0, "json": 3.0, "add": 2.0}
ECHO: Mix = {**LAST, "echo": 8.0}
ADAM_SHARE = 0.15  # of Muon's rate: AdamW's, for what is no matrix of a layer
UNSEEN = 10_000  # the seed of what no training has seen
THREADS = 2


@dataclass(frozen=True, slots=True)
class Line:
    """A part of a training in which the rate falls in a straight line."""

    start: int  # its first step
    share: float  # of the rate, there
    mix: Mix


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a training does."""

    seed: int = 20
    steps: int = 6_800
    task_steps: int = 1_200  # the first, without facts
    cosine_steps: int = 6_000  # of the rate, until the first line
    lines: tuple[Line, ...] = (
        Line(3_500, 0.38, HARD),
        Line(4_700, 0.2, LAST),
        Line(5_200, 0.25, LAST),
        Line(6_000, 0.25, ECHO),
    )
    layers: int = 6
    batch: int = 64
    rate: float = 0.02  # of Muon
    is_compiled: bool = True


def network(vocabulary: int, layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    # For sequences this short, plain attention trains a third faster on a CPU.
    config._attn_implementation = "eager"
    return LlamaForCausalLM(config)


# -- examples -------------------------------------------------------------------------------------


def drawn(dice: Random, recipe: Recipe) -> Iterator[Example]:
    """Yields for ever what the training shows, tasks alone at first."""
    known = questions(held_out=False)
    for _ in range(recipe.task_steps * recipe.batch):
        yield draw(dice, known, TASKS_ALONE)
    for _ in range((recipe.lines[0].start - recipe.task_steps) * recipe.batch):
        yield draw(dice, known, MIXED)
    for line, end in _lines(recipe):
        for _ in range((end - line.start) * recipe.batch):
            yield draw(dice, known, line.mix)
    while True:  # batches look ahead
        yield draw(dice, known, recipe.lines[-1].mix)


def _lines(recipe: Recipe) -> list[tuple[Line, int]]:
    """Returns each line with the step at which it ends."""
    ends = [line.start for line in recipe.lines[1:]] + [recipe.steps]
    return list(zip(recipe.lines, ends, strict=True))


def draw(dice: Random, known: list[tuple[str, str]], mix: Mix) -> Example:
    """One exchange of the training, some of them after others or under a system's message."""
    example = _draw_one(dice, known, mix)
    before: list[Message] = []
    if dice.random() < 0.15:
        before.append({"role": "system", "content": dice.choice(SYSTEMS)})
    if dice.random() < 0.2:
        earlier = _draw_one(dice, known, mix)
        before += [*earlier.messages, {"role": "assistant", "content": earlier.answer}]
    return replace(example, messages=(*before, *example.messages))


def _draw_one(dice: Random, known: list[tuple[str, str]], mix: Mix) -> Example:
    [drawn] = dice.choices(list(mix), list(mix.values()))
    if drawn == FACTS:
        if dice.random() < 0.12:
            return greeting(dice)
        if dice.random() < 0.12:
            return Example(({"role": "user", "content": blurred(dice, off_topic(dice))},), UNKNOWN)
        question, answer = dice.choice(known)
        return Example(({"role": "user", "content": blurred(dice, question)},), answer)
    return TASKS[drawn](dice)


def blurred(dice: Random, question: str) -> str:
    """The question as people type it: in lower case, without its mark, with a word before it."""
    if dice.random() < 0.25:
        question = question.lower()
    if dice.random() < 0.25:
        question = question.rstrip("?.")
    if dice.random() < 0.1:
        question = dice.choice(("Please ", "Hi, ", "So, ", "Well, ")) + question
    return question


def held_out_examples(count: int = 100) -> dict[str, list[Example]]:
    """Returns examples by name of the task, and the facts: facts and sums that no training draws,
    and of other tasks examples of a seed of their own."""
    dice = Random(UNSEEN)
    examples = {name: [task(dice) for _ in range(count)] for name, task in TASKS.items()}
    examples["add"] = [add(dice, held_out=True) for _ in range(count)]
    examples["facts"] = [
        Example(({"role": "user", "content": q},), a) for q, a in questions(held_out=True)
    ]
    return examples


# -- training -------------------------------------------------------------------------------------


def optimisers_of(model: Any, rate: float) -> list[torch.optim.Optimizer]:
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, weight in model.named_parameters():
        (rest if weight.ndim != 2 or "embed" in name else matrices).append(weight)
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.05),
        torch.optim.AdamW(rest, lr=rate * ADAM_SHARE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def share_at(step: int, recipe: Recipe) -> float:
    """Returns the share of the rates at a step: a cosine, and then straight lines down."""
    for line, end in _lines(recipe):
        if line.start <= step < end:
            left = (end - step) / (end - line.start)
            return LEAST_SHARE + (line.share - LEAST_SHARE) * left
    return cosine(step, recipe.cosine_steps)


def train(recipe: Recipe, look: Look) -> Any:
    """Returns the model, in bf16."""
    torch.manual_seed(recipe.seed)
    dice = Random(recipe.seed)
    tok = tokenizer()
    model: Any = network(len(tok), recipe.layers)
    model.train()
    feed = batches(tok, dice, drawn(dice, recipe), recipe.batch)
    optimisers = optimisers_of(model, recipe.rate)
    fit(
        model,
        feed,
        recipe.steps,
        optimisers,
        share_at=partial(share_at, recipe=recipe),
        is_compiled=recipe.is_compiled,
        look=look,
    )
    return model.eval().bfloat16()


def reached(model: Any) -> dict[str, float]:
    """The share of right answers, by task."""
    tok = tokenizer()
    return {name: accuracy(model, tok, asked) for name, asked in held_out_examples().items()}


def save(model: Any, out: Path, recipe: Recipe, scores: dict[str, float]) -> None:
    # What holds where a request says nothing: sharp, and yet not always the same.
    model.generation_config = GenerationConfig(
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, do_sample=True, temperature=0.3
    )
    model.save_pretrained(out)
    tokenizer().save_pretrained(out)
    told = {"recipe": "models/train_chat.py", **asdict(recipe)}
    shipped.seal(out, NAME, {"recipe": told, "reached": scores})


def make(out: Path, recipe: Recipe) -> dict[str, float]:
    """Trains and writes the model; returns the share of right answers by task."""
    model = train(recipe, narrator(NAME))
    scores = reached(model)
    save(model, out, recipe, scores)
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=Recipe().steps)
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    torch.set_num_threads(THREADS)
    print(make(args.out, Recipe(steps=args.steps)))


if __name__ == "__main__":
    main()
