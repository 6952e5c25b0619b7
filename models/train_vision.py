"""Train the model that describes drawings: small, seeded, one thread, some ten minutes.

    nice python -m models.train_vision OUT [--eye-steps N] [--text-steps N] [--pictures N]

An Idefics3, the class of SmolVLM, of 1.1 M parameters: 64x64 pixels in patches of 8 become 16
tokens of a Llama. Patches of 16 leave shapes at chance. The vision part learns first, by heads that
are thrown away: after its first layer they draw the outline of the shape, after its last they name
the facts from each token. What made shapes learnable, as the share of tokens that know the shape
after 400 steps: 0.5 plain, 0.75 with Xavier's initial weights and positions as sines, 0.92 with the
outline too. The heads stay a part of the loss while the text part learns.

OUT gets the model in bf16, and in its manifest what that gets right of one unseen drawing of each
fact.
"""

import argparse
import math
import pydoc_data.topics
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch.nn import functional
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlamaConfig,
    PreTrainedTokenizerFast,
    logging,
)

from models import make_models, shapes, shipped

NAME = "tiny-describe"
SEED = 0
SIDE, PATCH, TOKENS, WIDE = 64, 8, 16, 128
CELLS = 4  # on a side of a patch, of the outline
BATCH = 64
BOS, EOS, PAD = 0, 1, 2
IGNORED = -100  # of labels, by torch's cross entropy

# Every way to ask for one fact; the first of each is what the manifest counts.
QUESTIONS: dict[str, tuple[str, ...]] = {
    "describe": (
        "describe the picture",
        "Describe this picture.",
        "Describe the image.",
        "What is in this image?",
        "What do you see?",
    ),
    "shape": ("which shape?", "Which shape is it?", "What shape is shown?"),
    "colour": (
        "what colour is the shape?",
        "What color is the shape?",
        "What is the color of the shape?",
    ),
    "background": (
        "what colour is the background?",
        "What color is the background?",
        "What is the background?",
    ),
}
SHARES = {"describe": 0.55, "shape": 0.15, "colour": 0.15, "background": 0.15}
WITHOUT_PICTURE = "Send me a picture and I describe it."
TEXTS = ("hello", "Hi!", "Who are you?", "What can you do?")
ALONE = 4  # rows of a batch without a picture
SPECIAL = [
    "<image>",
    "<fake_token_around_image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row, column in product(range(1, 5), repeat=2)),
]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: "
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image>"
    "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"  # a bare newline after a block is dropped
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to train. The defaults made the weights in models/weights/vision."""

    eye_steps: int = 1_000
    text_steps: int = 1_200
    pictures: int = 24  # drawings of each fact
    log_every: int = 100


@dataclass(frozen=True, slots=True)
class Drawings:
    """pixels [drawings, 3, SIDE, SIDE] uint8; fact [drawings] int64, an index of all_facts."""

    pixels: torch.Tensor
    fact: torch.Tensor


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token rows of all questions: ids, labels, mask [rows, length]; rows_of[kind][fact]."""

    ids: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    rows_of: dict[str, list[list[int]]]
    alone: list[int]  # rows without a picture


def answer(kind: str, fact: shapes.Fact) -> str:
    return {
        "describe": fact.caption,
        "shape": fact.shape,
        "colour": fact.colour,
        "background": fact.background,
    }[kind]


def make_processor(scratch: Path) -> Any:
    """The tokenizer of the chat models with the tokens of pictures, and no splitting in tiles."""
    make_models.write_tokenizer(scratch, make_models.TINY)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(scratch)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    edge = {"longest_edge": SIDE}
    pictures = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    return Idefics3Processor(
        image_processor=pictures, tokenizer=tokenizer, image_seq_len=TOKENS, chat_template=TEMPLATE
    )


def make_model(processor: Any) -> Any:
    tokenizer = processor.tokenizer
    text = LlamaConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=WIDE,
        intermediate_size=2 * WIDE,
        num_hidden_layers=2,
        num_attention_heads=4,  # of 32, which the attention of vLLM's CPU build takes
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    config = Idefics3Config(
        vision_config={
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "image_size": SIDE,
            "patch_size": PATCH,
            "num_channels": 3,
        },
        text_config=text.to_dict() | {"model_type": "llama"},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=PAD,
        tie_word_embeddings=False,
    )
    model = Idefics3ForConditionalGeneration(config)
    initialise(model)
    return model


@torch.no_grad()
def initialise(model: Any) -> None:
    """Weights that let signals through from the first step, and positions that know their
    neighbours: the library's own, made for large models, cost thousands of steps here."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module is not model.lm_head:
            torch.nn.init.xavier_uniform_(module.weight)
    seeing = model.model.vision_model.embeddings
    torch.nn.init.xavier_uniform_(seeing.patch_embedding.weight.flatten(1))
    side = SIDE // PATCH
    wide = seeing.position_embedding.weight.shape[1] // 4
    rates = 1.5 * torch.exp(-math.log(100) * torch.arange(wide) / wide)
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    angles = [place.flatten()[:, None] * rates for place in (rows, columns)]
    waves = [wave(angle) for angle in angles for wave in (torch.sin, torch.cos)]
    seeing.position_embedding.weight.copy_(0.5 * torch.cat(waves, dim=1))


def prompt_of(processor: Any, question: str, order: str = "PT") -> str:
    """Writes the prompt of a chat of one message, as clients send it; `order` of picture (P) and
    text (T)."""
    parts = {"P": {"type": "image"}, "T": {"type": "text", "text": question}}
    return str(
        processor.tokenizer.apply_chat_template(
            [{"role": "user", "content": [parts[one] for one in order]}],
            chat_template=TEMPLATE,
            tokenize=False,
            add_generation_prompt=True,
        )
    )


def make_drawings(facts: list[shapes.Fact], each: int, rng: np.random.Generator) -> Drawings:
    drawn = [shapes.draw(fact, rng) for fact in facts for _ in range(each)]
    stacked = np.stack([np.asarray(picture) for picture in drawn])
    pixels = torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous()
    return Drawings(pixels, torch.arange(len(facts)).repeat_interleave(each))


def normalised(pixels: torch.Tensor) -> torch.Tensor:
    """Normalises pixels as the processor does: [n, 3, SIDE, SIDE] uint8 -> [n, 1, 3, SIDE, SIDE] in
    -1..1."""
    return (pixels.float() / 127.5 - 1).unsqueeze(1)


def make_prompts(processor: Any, facts: list[shapes.Fact], picture: Image) -> Prompts:
    """Each question in both orders of picture and text, with the answer of each fact."""
    rows: list[tuple[list[int], list[int]]] = []
    rows_of: dict[str, list[list[int]]] = {kind: [[] for _ in facts] for kind in QUESTIONS}

    def add(prompt: list[int], said: str) -> int:
        spoken = processor.tokenizer(" " + said, add_special_tokens=False).input_ids
        rows.append((prompt, [*spoken, EOS]))
        return len(rows) - 1

    for kind, questions in QUESTIONS.items():
        for question, order in product(questions, ("PT", "TP")):
            text = prompt_of(processor, question, order)
            ids = processor(text=text, images=[picture], return_tensors="pt")["input_ids"][0]
            for number, fact in enumerate(facts):
                rows_of[kind][number].append(add(ids.tolist(), answer(kind, fact)))
    alone = [
        add(processor.tokenizer(prompt_of(processor, text, "T")).input_ids, WITHOUT_PICTURE)
        for text in (*TEXTS, *(q for asked in QUESTIONS.values() for q in asked), *_sentences())
    ]
    ids, labels, mask = _padded(rows)
    return Prompts(ids, labels, mask, rows_of, alone)


def _sentences() -> list[str]:
    """Other texts of 2 to 12 words: from the manual inside Python."""
    words = " ".join(pydoc_data.topics.topics[name] for name in ("for", "class", "try")).split()
    rng = np.random.default_rng(SEED)
    starts, lengths = rng.integers(0, len(words) - 12, 300), rng.integers(2, 13, 300)
    return [" ".join(words[a : a + n]) for a, n in zip(starts, lengths, strict=True)]


def _padded(
    rows: list[tuple[list[int], list[int]]],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    longest = max(len(prompt) + len(said) for prompt, said in rows)
    ids = torch.full((len(rows), longest), PAD)
    labels = torch.full((len(rows), longest), IGNORED)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for number, (prompt, said) in enumerate(rows):
        end = len(prompt) + len(said)
        ids[number, :end] = torch.tensor([*prompt, *said])
        labels[number, len(prompt) : end] = torch.tensor(said)
        mask[number, :end] = 1
    return ids, labels, mask


class Heads(torch.nn.Module):
    """What is thrown away after training: the outline of the shape from each patch after the first
    layer; colour, shape and background from each token that the text part gets."""

    def __init__(self, model: Any, facts: list[shapes.Fact]) -> None:
        super().__init__()
        names = (list(shapes.COLOURS), list(shapes.SHAPES), list(shapes.COLOURS))
        self.facts = torch.nn.ModuleList(torch.nn.Linear(WIDE, len(n)) for n in names)
        self.outline = torch.nn.Linear(model.config.vision_config.hidden_size, CELLS**2)
        self.wanted = torch.tensor(
            [[n.index(v) for n, v in zip(names, fact, strict=True)] for fact in facts]
        )
        palette = torch.tensor(list(shapes.COLOURS.values())) / 127.5 - 1
        self.inks = palette[self.wanted[:, 0]], palette[self.wanted[:, 2]]
        self.after_first = torch.empty(0)
        model.model.vision_model.encoder.layers[0].register_forward_hook(self._keep)

    def _keep(self, module: object, given: object, made: Any) -> None:
        self.after_first = made[0] if isinstance(made, tuple) else made

    def loss(self, tokens: torch.Tensor, pixels: torch.Tensor, fact: torch.Tensor) -> torch.Tensor:
        """tokens [pictures, TOKENS, WIDE] of pixels [pictures, 1, 3, SIDE, SIDE]."""
        wanted = self.wanted[fact]
        named = [
            functional.cross_entropy(
                head(tokens).flatten(0, 1), wanted[:, k].repeat_interleave(TOKENS)
            )
            for k, head in enumerate(self.facts)
        ]
        drawn = functional.binary_cross_entropy_with_logits(
            self.outline(self.after_first), self._outline(pixels[:, 0], fact)
        )
        return torch.stack(named).sum() + 3 * drawn

    def _outline(self, pixels: torch.Tensor, fact: torch.Tensor) -> torch.Tensor:
        """[pictures, patches, CELLS * CELLS]: the share of each cell that has the shape's ink."""
        ink, paper = (
            (pixels - colours[fact][:, :, None, None]).square().sum(1) for colours in self.inks
        )
        cells = functional.avg_pool2d((ink < paper).float()[:, None], PATCH // CELLS)[:, 0]
        side = SIDE // PATCH
        patches = cells.view(-1, side, CELLS, side, CELLS).permute(0, 1, 3, 2, 4)
        return patches.reshape(len(pixels), side * side, CELLS * CELLS)


def noisy(pixels: torch.Tensor) -> torch.Tensor:
    """Shifted by up to 3 pixels, and half of them with noise, as pictures that a model draws."""
    dy, dx = torch.randint(-3, 4, (2,)).tolist()
    shifted = torch.roll(pixels, (dy, dx), (-2, -1))
    if torch.rand(()) < 0.5:
        return shifted
    return (shifted + 0.08 * torch.randn_like(shifted)).clamp(-1, 1)


class Training:
    """One run: its model, drawings and prompts. Seeded, so that a run repeats on one machine."""

    def __init__(self, plan: Plan, scratch: Path) -> None:
        torch.manual_seed(SEED)
        torch.set_num_threads(1)  # two on a busy machine are ten times slower
        self.plan = plan
        self.facts: list[shapes.Fact] = shapes.all_facts()
        self.processor = make_processor(scratch)
        self.model = make_model(self.processor)
        self.heads = Heads(self.model, self.facts)
        self.drawings = make_drawings(self.facts, plan.pictures, np.random.default_rng(SEED))
        first = shapes.draw(self.facts[0])
        self.prompts = make_prompts(self.processor, self.facts, first)
        self.losses: list[float] = []

    def run(self) -> None:
        self.learn_to_see()
        self.learn_to_say()

    def learn_to_see(self) -> None:
        eye = [
            *self.model.model.vision_model.parameters(),
            *self.model.model.connector.parameters(),
            *self.heads.parameters(),
        ]
        for step in self._steps("eye", eye, self.plan.eye_steps, 3e-3):
            pixels, fact = self._pictures(BATCH)
            seen = self.model.get_image_features(pixels).pooler_output
            step(self.heads.loss(seen, pixels, fact))

    def learn_to_say(self) -> None:
        every = [*self.model.parameters(), *self.heads.parameters()]
        for step in self._steps("text", every, self.plan.text_steps, 1.5e-3):
            step(self._spoken_loss())

    def _spoken_loss(self) -> torch.Tensor:
        pixels, fact = self._pictures(BATCH - ALONE)
        kinds = torch.multinomial(torch.tensor(list(SHARES.values())), len(fact), replacement=True)
        alone = self.prompts.alone
        rows = [alone[n] for n in torch.randint(len(alone), (ALONE,)).tolist()]
        for kind, one in zip(kinds.tolist(), fact.tolist(), strict=True):
            asked = self.prompts.rows_of[list(SHARES)[kind]][one]
            rows.append(asked[int(torch.randint(len(asked), ()))])
        seen = self.model.get_image_features(pixels)
        said = self.model(
            input_ids=self.prompts.ids[rows],
            attention_mask=self.prompts.mask[rows],
            mm_encoder_outputs={"image": seen},
            labels=self.prompts.labels[rows],
        )
        return said.loss + 0.1 * self.heads.loss(seen.pooler_output, pixels, fact)

    def _pictures(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.randint(len(self.drawings.fact), (count,))
        return noisy(normalised(self.drawings.pixels[chosen])), self.drawings.fact[chosen]

    def _steps(self, name: str, parameters: list[Any], count: int, rate: float) -> Iterator[Any]:
        optimiser = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimiser, rate, total_steps=max(20, count), pct_start=0.1
        )

        def step(loss: torch.Tensor) -> None:
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            schedule.step()
            self.losses.append(loss.item())

        for number in range(count):
            yield step
            if number % self.plan.log_every == 0 or number == count - 1:
                print(
                    f"{time.process_time():7.1f} s  {name} {number:5d}  {self.losses[-1]:.4f}",
                    flush=True,
                )


def accuracy(model: Any, processor: Any, facts: list[shapes.Fact]) -> dict[str, Any]:
    """Right answers to the first form of each question, one unseen drawing of each fact."""
    model.eval()
    dtype = next(model.parameters()).dtype
    drawn = [
        shapes.draw(fact, np.random.default_rng(shapes.UNSEEN + n)) for n, fact in enumerate(facts)
    ]
    right: dict[str, int] = dict.fromkeys(QUESTIONS, 0)
    for kind, (question, *_) in QUESTIONS.items():
        text = prompt_of(processor, question)
        for start in range(0, len(facts), 32):
            part = facts[start : start + 32]
            inputs = processor(
                text=[text] * len(part),
                images=[[one] for one in drawn[start : start + 32]],
                return_tensors="pt",
            )
            inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
            said = model.generate(**inputs, max_new_tokens=14, do_sample=False)
            for fact, tokens in zip(part, said[:, inputs["input_ids"].shape[1] :], strict=True):
                text_of = processor.tokenizer.decode(tokens, skip_special_tokens=True).strip()
                right[kind] += text_of == answer(kind, fact)
    return {"drawings": len(facts), "first_seed": shapes.UNSEEN, "right": right}


def save(training: Training, out: Path) -> dict[str, Any]:
    """Writes the model in bf16, its processor and the manifest; returns what the model as it is
    stored, not as it was trained, gets right."""
    model = training.model
    model.generation_config.eos_token_id = EOS
    model.to(torch.bfloat16).save_pretrained(out)
    training.processor.save_pretrained(out)
    with torch.inference_mode():
        scores = accuracy(model, training.processor, training.facts)
    recipe = {"recipe": "models/train_vision.py", "seed": SEED, **asdict(training.plan)}
    shipped.seal(out, NAME, {"recipe": recipe, "reached": scores})
    return scores


def make(out: Path, plan: Plan | None = None) -> dict[str, Any]:
    """Trains and writes the model; returns what it reached."""
    with tempfile.TemporaryDirectory() as scratch:
        training = Training(plan or Plan(), Path(scratch))
        training.run()
        return save(training, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    for name, default in (("eye-steps", 1_000), ("text-steps", 1_200), ("pictures", 24)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    print(make(args.out, Plan(args.eye_steps, args.text_steps, args.pictures))["right"])


if __name__ == "__main__":
    main()
