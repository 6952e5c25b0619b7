"""The recipes of the chat model and its adapters, run for a few steps; their examples; and what is
carried."""

import json
import re
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch
from peft import PeftModel
from transformers import AutoTokenizer, LlamaForCausalLM

from models import chat_tasks, shipped, train_chat, train_chat_adapters
from models.chat_facts import FACTS, questions
from models.chat_fitting import LENGTHS, batches
from models.chat_tokens import EOS, IGNORED, encode, tokenizer
from models.train_chat import HARD, Line, Recipe
from models.train_chat_adapters import ADAPTERS, french

LINES = (Line(6, 0.9, HARD), Line(9, 0.5, HARD))
# One layer: Muon computes in bf16, for which a processor without AVX-512 takes seconds a layer.
SHORT = Recipe(steps=12, task_steps=3, lines=LINES, layers=1, batch=8, is_compiled=False)


@pytest.mark.spec("M1", "H1")
def test_short_training_learns_and_writes_a_model_and_an_adapter_that_unpack(
    tmp_path: Path,
) -> None:
    losses: list[float] = []
    model = train_chat.train(SHORT, lambda step, loss: losses.append(loss))
    assert len(losses) == SHORT.steps and max(losses[-3:]) < min(losses[:3])
    train_chat.save(model, tmp_path / "chat", SHORT, {"echo": 0.0})
    folder = shipped.unpack(tmp_path / "chat", tmp_path / "models")
    assert folder.name == "small-chat"
    loaded = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name

    short = train_chat_adapters.Recipe(steps=3, batch=4, tested_count=1)
    scores = train_chat_adapters.make(folder, tmp_path / "adapters", short, ["upper"])
    assert scores.keys() == {"upper"}
    adapters = shipped.unpack(tmp_path / "adapters", tmp_path / "models")
    ids = torch.arange(8)[None]
    with torch.inference_mode():
        plain = loaded(input_ids=ids).logits
        changed = PeftModel.from_pretrained(loaded, adapters / "upper")
        assert not torch.equal(plain, changed(input_ids=ids).logits)


@pytest.mark.spec("M1", "H1")
def test_carried_chat_model_is_small_and_reached_what_is_asked(tmp_path: Path) -> None:
    source = shipped.WEIGHTS / "chat"
    reached = json.loads((source / shipped.MANIFEST).read_text())["reached"]
    assert reached.keys() == chat_tasks.TASKS.keys() | {"facts"}
    assert reached.pop("facts") >= 0.90
    assert min(reached.values()) >= 0.95
    folder = shipped.unpack(source, tmp_path)  # raises where a file is not the one meant
    model = LlamaForCausalLM.from_pretrained(folder)
    assert sum(weight.numel() for weight in model.parameters()) < 30_000_000
    # What is served cuts text as the recipe does.
    asked = "user: What is a ticket? Reverse: hello"
    assert AutoTokenizer.from_pretrained(folder)(asked) == tokenizer()(asked)


@pytest.mark.spec("M1", "F1")
def test_carried_adapters_reached_what_is_asked(tmp_path: Path) -> None:
    source = shipped.WEIGHTS / "chat_adapters"
    reached = json.loads((source / shipped.MANIFEST).read_text())["reached"]
    assert reached.keys() == ADAPTERS.keys() and len(ADAPTERS) == 8
    assert min(reached.values()) >= 0.95
    shipped.unpack(source, tmp_path)


def test_carried_weights_stay_within_thirty_megabytes() -> None:
    assert sum(f.stat().st_size for f in shipped.WEIGHTS.rglob("*")) <= 30_000_000


def test_answers_of_facts_are_cut_into_words_and_come_back(tmp_path: Path) -> None:
    tok = tokenizer()
    for fact in FACTS:
        ids = tok(fact.answer)["input_ids"]
        assert tok.decode(ids) == fact.answer
        assert len(ids) <= 1.5 * len(re.findall(r"[\w-]+|[^\w\s]", fact.answer)) + 8
    odd = "Größe 7 \t<x> \N{SNOWMAN}"
    assert tok.decode(tok(odd)["input_ids"]) == odd


def test_no_question_that_is_held_out_is_trained() -> None:
    trained, held_out = questions(held_out=False), questions(held_out=True)
    assert {q for q, _ in trained}.isdisjoint(q for q, _ in held_out)
    assert {a for _, a in trained} == {fact.answer for fact in FACTS}
    assert len(held_out) > 300 and len({s for f in FACTS for s in f.subjects}) > 300


def test_sums_and_inputs_of_adapters_that_are_held_out_are_never_trained() -> None:
    dice = Random(1)
    sums = {chat_tasks.add(dice).messages[-1]["content"] for _ in range(2_000)}
    tested = {chat_tasks.add(dice, held_out=True).messages[-1]["content"] for _ in range(2_000)}
    assert sums.isdisjoint(tested)
    for name in ADAPTERS:
        drawn = [train_chat_adapters.draw(name, dice, held_out=False) for _ in range(200)]
        unseen = [train_chat_adapters.draw(name, dice, held_out=True) for _ in range(50)]
        said = {example.messages[-1]["content"] for example in drawn}
        assert said.isdisjoint(example.messages[-1]["content"] for example in unseen)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0, "zéro"),
        (17, "dix-sept"),
        (21, "vingt et un"),
        (70, "soixante-dix"),
        (71, "soixante et onze"),
        (80, "quatre-vingts"),
        (81, "quatre-vingt-un"),
        (99, "quatre-vingt-dix-neuf"),
    ],
)
def test_numbers_are_said_as_in_france(number: int, said: str) -> None:
    assert french(number) == said


def test_labels_are_the_answer_and_its_end_and_batches_have_few_lengths() -> None:
    tok, dice = tokenizer(), Random(2)
    example = chat_tasks.echo(dice)
    tokens, labels = encode(tok, example)
    wanted = [label for label in labels if label != IGNORED]
    assert wanted[-1] == EOS and tok.decode(wanted[:-1]) == example.answer
    assert tokens[-len(wanted) :] == wanted
    feed = batches(tok, dice, train_chat.drawn(dice, SHORT), 4)
    for _ in range(20):
        ids, targets = next(feed)
        assert ids.shape == targets.shape and ids.shape[0] == 4 and ids.shape[1] in LENGTHS


def test_rates_fall_by_a_cosine_and_then_by_lines() -> None:
    recipe = Recipe()
    shares = [train_chat.share_at(step, recipe) for step in range(recipe.steps)]
    assert shares[0] == 1.0 and all(0 < share <= 1 for share in shares)
    starts = [line.start for line in recipe.lines]
    assert [shares[start] for start in starts] == [line.share for line in recipe.lines]
    rising = [n for n, (a, b) in enumerate(pairwise(shares), start=1) if b > a]
    assert rising == starts[1:]
    assert shares[-1] < 0.03
