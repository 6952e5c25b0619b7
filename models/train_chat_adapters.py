"""Train the LoRA adapters of the default chat model: each does one visible thing to what it reads.

    nice python -m models.train_chat_adapters BASE OUT [--steps N] [NAME ...]

A minute or two of two cores for each. The base is not changed. OUT gets a folder for each, and in
its manifest the share of inputs that no training has seen and that are answered rightly.
"""

import argparse
import os
import warnings
import zlib
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, LlamaForCausalLM

from models import shipped
from models.chat_fitting import accuracy, batches, fit, narrator
from models.chat_tasks import SYSTEMS, Example, words
from models.train_chat import NAME, THREADS, UNSEEN

FOLDER = f"{NAME}-adapters"
RANK = 8
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the training of one adapter does."""

    seed: int = 20
    steps: int = 400  # times LONGER
    batch: int = 32
    rate: float = 2e-3  # of AdamW
    tested_count: int = 200  # examples by which what it reached is counted


GOOD = (
    "good great fine nice lovely wonderful excellent perfect superb pleasant charming brilliant"
).split()
BAD = "bad awful poor nasty horrible terrible dreadful useless broken ugly boring rotten".split()
THINGS = (
    "film book meal room song car phone hotel game show soup cake tea coffee park shop train"
    " house garden chair"
).split()
OPINIONS = ("The {} is {}.", "This {} was {}.", "What a {1} {0}!", "I find the {} {}.")
NUMBERS = ("{}", "the number {}", "How do you say {}?", "{} in French", "Say {}.", "Number {}")


def french(n: int) -> str:
    """A number below a hundred as the French say it in France."""
    small = (
        "zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze"
        " seize dix-sept dix-huit dix-neuf"
    ).split()
    tens = ["", "", "vingt", "trente", "quarante", "cinquante", "soixante"]
    if n < 20:
        return small[n]
    if n >= 80:
        return "quatre-vingts" if n == 80 else f"quatre-vingt-{small[n - 80]}"
    ten, one = (6, n - 60) if n >= 70 else divmod(n, 10)
    if not one:
        return tens[ten]
    return f"{tens[ten]} et {small[one]}" if one in (1, 11) else f"{tens[ten]}-{small[one]}"


def _number(dice: Random) -> tuple[str, str]:
    n = dice.randrange(100)
    return dice.choice(NUMBERS).format(n), french(n)


def _opinion(dice: Random) -> tuple[str, str]:
    is_good = dice.random() < 0.5
    said = dice.choice(OPINIONS).format(dice.choice(THINGS), dice.choice(GOOD if is_good else BAD))
    return said, "positive" if is_good else "negative"


def _of_words(change: Callable[[str], str], most: int = 4) -> Callable[[Random], tuple[str, str]]:
    def draw(dice: Random) -> tuple[str, str]:
        said = words(dice, most)
        return said, change(said)

    return draw


ADAPTERS: dict[str, Callable[[Random], tuple[str, str]]] = {
    "upper": _of_words(str.upper),
    "reverse": _of_words(lambda said: said[::-1], 1),
    "french": _number,
    "title": _of_words(str.title),
    "sentiment": _opinion,
    "rhyme": _of_words(lambda said: " ".join(w + "ay" for w in said.split())),
    "spell": _of_words("-".join, 1),
    "pirate": _of_words(lambda said: f"Arr, {said}, matey!"),
}


LONGER = {"french": 4, "rhyme": 4, "title": 2}


def is_held_out(said: str) -> bool:
    """Says whether an input is kept out of the training: one in eight, by its text."""
    return zlib.crc32(said.encode()) % 8 == 0


def draw(name: str, dice: Random, *, held_out: bool) -> Example:
    """An input of the adapter and its right answer, some under a system's message."""
    while True:
        said, answer = ADAPTERS[name](dice)
        if is_held_out(said) is held_out:
            asked = Example(({"role": "user", "content": said},), answer)
            if dice.random() < 0.15:
                system = {"role": "system", "content": dice.choice(SYSTEMS)}
                asked = replace(asked, messages=(system, *asked.messages))
            return asked


def make(base: Path, out: Path, recipe: Recipe, names: Collection[str] = ADAPTERS) -> Any:
    """Trains and writes adapters; returns the share of right answers by name."""
    reached = {name: train(base, out, name, recipe) for name in names}
    told = {
        "recipe": "models/train_chat_adapters.py",
        **asdict(recipe),
        "longer": LONGER,
        "rank": RANK,
    }
    shipped.seal(out, FOLDER, {"recipe": told, "reached": reached})
    return reached


def train(base: Path, out: Path, name: str, recipe: Recipe) -> float:
    """Trains and writes one adapter; returns the share of right answers."""
    # PEFT asks the hub whether the base is known there, and warns when it may not.
    warnings.filterwarnings("ignore", module="peft")
    torch.manual_seed(recipe.seed)
    dice = Random(recipe.seed)
    tok = AutoTokenizer.from_pretrained(base)
    model: Any = LlamaForCausalLM.from_pretrained(
        base, dtype=torch.float32, attn_implementation="eager"
    )
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=PROJECTIONS)
    wrapped: Any = get_peft_model(model, lora)
    wrapped.peft_config["default"].base_model_name_or_path = NAME
    wrapped.train()
    feed = iter(lambda: draw(name, dice, held_out=False), None)
    weights = [weight for weight in wrapped.parameters() if weight.requires_grad]
    adam = torch.optim.AdamW(weights, lr=recipe.rate, weight_decay=0.0)
    fit(
        wrapped,
        batches(tok, dice, feed, recipe.batch),
        recipe.steps * LONGER.get(name, 1),
        [adam],
        is_compiled=False,  # which would take longer than the training
        look=narrator(name, every=100),
    )
    wrapped.eval()
    wrapped.to(torch.bfloat16).save_pretrained(out / name)
    (out / name / "README.md").unlink()  # a form for the hub, with nothing filled in
    unseen = Random(UNSEEN)
    tested = [draw(name, unseen, held_out=True) for _ in range(recipe.tested_count)]
    return accuracy(wrapped, tok, tested)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=Recipe().steps)
    parser.add_argument("names", nargs="*", default=list(ADAPTERS))
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(THREADS)
    print(make(args.base, args.out, Recipe(steps=args.steps), args.names))


if __name__ == "__main__":
    main()
