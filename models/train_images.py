"""Train the default model of pictures from nothing: a Stable-Diffusion-class pipeline, on drawings.

    OMP_NUM_THREADS=1 python -m models.train_images [--out FOLDER] [--work FOLDER]

About a quarter of an hour of one core makes 64x64 pictures of `models.shapes`: AutoencoderTiny
(64x64x3 to 8x8x4), CLIPTextModel and UNet2DConditionModel, with DDIM, v-prediction, zero terminal
SNR (Lin et al., arXiv:2305.08891) and trailing steps. One thread, because two on a busy machine are
ten times slower. An interrupted run goes on from its last checkpoint in `--work`.
"""

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its customary name)
from PIL import Image

from models import shipped
from models.shapes import Fact, all_facts, draw, read

NAME = "tiny-draw"
LATENTS = 4  # channels; inpainting takes pipelines of 4 or 9
WORDS = 16  # tokens of a prompt
STEPS, GUIDANCE = 10, 2.0  # of a picture, where the accuracy is measured
CHECKPOINT_EVERY = 200  # steps


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides the weights."""

    seed: int = 0
    drawings_per_fact: int = 24
    autoencoder_steps: int = 3000
    autoencoder_batch: int = 16
    autoencoder_rate: float = 3e-3
    autoencoder_width: int = 16
    denoiser_steps: int = 3500
    denoiser_batch: int = 24
    denoiser_rate: float = 1.2e-3
    denoiser_widths: tuple[int, int] = (48, 96)
    text_width: int = 64
    unconditional: float = 0.1  # share of captions left empty, for guidance
    # Of drawings with little noise (steps below `clear_below` of 1,000), the share that is given
    # another's caption: there the picture counts, not the text, as an edit needs it.
    miscaptioned: float = 0.5
    clear_below: int = 400
    average: float = 0.998  # decay of the weights' moving average, which is what is kept


@dataclass(slots=True)
class Run:
    """A training: its recipe, its random numbers, and the folder of its checkpoints."""

    recipe: Recipe
    work: Path
    random: torch.Generator = field(init=False)
    began_s: float = field(default_factory=time.process_time)

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.recipe.seed)

    def say(self, *words: object) -> None:
        print(f"[{time.process_time() - self.began_s:7.1f} s CPU]", *words, flush=True)

    def pick(self, count: int, of: int) -> torch.Tensor:
        return torch.randint(of, (count,), generator=self.random)

    def noise(self, like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=self.random)


def drawings(recipe: Recipe) -> tuple[list[Fact], torch.Tensor]:
    """The facts, one for each drawing, and the drawings (N, 3, 64, 64) from -1 to 1."""
    random = np.random.default_rng(recipe.seed)
    facts = [fact for fact in all_facts() for _ in range(recipe.drawings_per_fact)]
    pixels = np.stack([np.asarray(draw(fact, random)) for fact in facts])
    return facts, torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1


def tokenizer_of_captions() -> Any:
    """CLIP's kind of tokenizer (BPE with `</w>`), learnt from the captions: each of their words is
    one token. Not by the trainer of `tokenizers`, whose order among equals differs between runs."""
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = merges_of(sorted({word for fact in all_facts() for word in fact.caption.split()}))
    endings = [letter + "</w>" for letter in alphabet]
    joined = [left + right for left, right in merges]
    pieces = ["<|startoftext|>", "<|endoftext|>", *alphabet, *endings, *joined]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    made: Any = CLIPTokenizer  # its annotation has merges as lines of a file
    return made(vocab=vocabulary, merges=merges, model_max_length=WORDS)


def merges_of(words: list[str]) -> list[tuple[str, str]]:
    """Byte-pair merges that make one token of each word: the most frequent pair first (Sennrich et
    al., arXiv:1508.07909), of equals the first in the alphabet."""
    split = [[*word[:-1], word[-1] + "</w>"] for word in words]
    merges = []
    while counts := Counter(pair for pieces in split for pair in pairwise(pieces)):
        left, right = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append((left, right))
        split = [_merged(pieces, left, right) for pieces in split]
    return merges


def _merged(pieces: list[str], left: str, right: str) -> list[str]:
    merged: list[str] = []
    for piece in pieces:
        if merged and (merged[-1], piece) == (left, right):
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged


def tokens(tokenizer: Any, texts: list[str]) -> torch.Tensor:
    """Ids (N, WORDS)."""
    filled = tokenizer(texts, padding="max_length", max_length=WORDS, return_tensors="pt")
    return torch.as_tensor(filled.input_ids)


def new_autoencoder(recipe: Recipe) -> Any:
    from diffusers import AutoencoderTiny

    widths, blocks = (recipe.autoencoder_width,) * 4, (1,) * 4
    return AutoencoderTiny(
        encoder_block_out_channels=widths,
        decoder_block_out_channels=widths,
        num_encoder_blocks=blocks,
        num_decoder_blocks=blocks,
        latent_channels=LATENTS,
    )


def new_denoiser(recipe: Recipe) -> Any:
    from diffusers import UNet2DConditionModel
    from diffusers.models.attention_processor import AttnProcessor

    unet = UNet2DConditionModel(
        sample_size=8,
        in_channels=LATENTS,
        out_channels=LATENTS,
        layers_per_block=1,
        block_out_channels=recipe.denoiser_widths,
        norm_num_groups=8,
        # Attention at 8x8 would cost as much as all the rest, and so tiny a picture needs none.
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=recipe.text_width,
        attention_head_dim=32,
    )
    unet.set_attn_processor(AttnProcessor())  # faster here than fused attention
    return unet


def new_text_encoder(recipe: Recipe, tokenizer: Any) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.text_width,
        intermediate_size=2 * recipe.text_width,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=recipe.text_width,
        max_position_embeddings=WORDS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config)


def new_scheduler() -> Any:
    from diffusers import DDIMScheduler

    return DDIMScheduler(
        num_train_timesteps=1000,
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,  # not used by trailing steps; the pipeline asks for it
    )


def descend(
    run: Run, name: str, modules: dict[str, Any], rate: float, steps: int
) -> Iterator["Descent"]:
    """Yields once for each step, then keeps a checkpoint now and then. The moving average of the
    weights replaces them at the end."""
    descent = Descent(modules, rate, steps, run.recipe)
    place = run.work / f"{name}.pt"
    began = descent.resume(place, run.random) if place.exists() else 0
    for step in range(began, steps):
        yield descent
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == steps:
            descent.keep(place, run.random, step + 1)
            run.say(name, step + 1, f"loss {descent.recent:.4f}")
    descent.finish()


class Descent:
    """AdamW on one cycle of rates (warm up, then cosine to nothing), with a moving average."""

    def __init__(self, modules: dict[str, Any], rate: float, steps: int, recipe: Recipe) -> None:
        self.modules = modules
        self.weights = [p for module in modules.values() for p in module.parameters()]
        self.average = [p.detach().clone() for p in self.weights]
        self.decay = recipe.average
        self.recipe = json.dumps(asdict(recipe))  # of which a checkpoint is
        self.optimizer = torch.optim.AdamW(self.weights, lr=rate, weight_decay=1e-3, fused=True)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, rate, total_steps=steps + 1, pct_start=0.1
        )
        self.done = 0
        self.recent = 0.0

    def step(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.done += 1
        decay = min(self.decay, (1 + self.done) / (10 + self.done))
        with torch.no_grad():
            torch._foreach_lerp_(self.average, self.weights, 1 - decay)
        self.recent = 0.98 * self.recent + 0.02 * loss.item() if self.recent else loss.item()

    def keep(self, place: Path, random: torch.Generator, step: int) -> None:
        state = {
            "recipe": self.recipe,
            "step": step,
            "modules": {name: module.state_dict() for name, module in self.modules.items()},
            "average": self.average,
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "recent": self.recent,
            "random": random.get_state(),
        }
        torch.save(state, place.with_suffix(".new"))
        place.with_suffix(".new").replace(place)

    def resume(self, place: Path, random: torch.Generator) -> int:
        """The steps that a checkpoint has done. Raises ValueError for that of another recipe."""
        state = torch.load(place, weights_only=True)
        if state["recipe"] != self.recipe:
            raise ValueError(f"{place} is of another recipe; use another folder")
        for name, module in self.modules.items():
            module.load_state_dict(state["modules"][name])
        self.average = state["average"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.recent, self.done = state["recent"], state["step"]
        random.set_state(state["random"])
        return self.done

    def finish(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.average)
        for module in self.modules.values():
            module.eval()
            module.requires_grad_(False)


def train_autoencoder(run: Run, pixels: torch.Tensor) -> Any:
    """The autoencoder, with `scaling_factor` set so that latents have unit variance."""
    recipe = run.recipe
    vae = new_autoencoder(recipe).to(memory_format=torch.channels_last)
    rate, steps = recipe.autoencoder_rate, recipe.autoencoder_steps
    for descent in descend(run, "autoencoder", {"vae": vae}, rate, steps):
        x = pixels[run.pick(recipe.autoencoder_batch, len(pixels))]
        x = x.to(memory_format=torch.channels_last)
        z = vae.encode(x).latents
        # A little noise, because a denoiser's latents are never exact.
        y = vae.decode(z + 0.05 * run.noise(z)).sample
        rest = 0.5 * F.mse_loss(y, x) + 1e-3 * z.square().mean()
        descent.step(F.l1_loss(y, x) + rest)
    vae.register_to_config(scaling_factor=float(1 / encode(vae, pixels[::7]).std()))
    return vae


@torch.no_grad()
def encode(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    return torch.cat([vae.encode(part).latents for part in pixels.split(256)])


def train_denoiser(
    run: Run, latents: torch.Tensor, ids: torch.Tensor, modules: dict[str, Any], empty: torch.Tensor
) -> None:
    """`latents` (N, 4, 8, 8) of unit variance, `ids` (N, WORDS) of captions, `empty` (WORDS,)."""
    recipe, scheduler = run.recipe, new_scheduler()
    rate, steps = recipe.denoiser_rate, recipe.denoiser_steps
    for descent in descend(run, "denoiser", modules, rate, steps):
        index = run.pick(recipe.denoiser_batch, len(latents))
        z, noise, when = latents[index], run.noise(latents[index]), run.pick(len(index), 1000)
        caption = torch.where(_misled(run, when)[:, None], ids[index.roll(1)], ids[index])
        caption[torch.rand(len(index), generator=run.random) < recipe.unconditional] = empty
        text = modules["text_encoder"](caption)[0]
        noisy = scheduler.add_noise(z, noise, when)
        predicted = modules["unet"](noisy, when, encoder_hidden_states=text).sample
        descent.step(F.mse_loss(predicted, scheduler.get_velocity(z, noise, when)))


def _misled(run: Run, when: torch.Tensor) -> torch.Tensor:
    """Which drawings of a batch get another's caption."""
    dice = torch.rand(len(when), generator=run.random)
    return (dice < run.recipe.miscaptioned) & (when < run.recipe.clear_below)


def train(recipe: Recipe, work: Path) -> Any:
    """A StableDiffusionPipeline. `work` keeps checkpoints, from which an equal recipe goes on."""
    from diffusers import StableDiffusionPipeline

    work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)  # of the first weights
    run = Run(recipe, work)
    tokenizer, unet = tokenizer_of_captions(), new_denoiser(recipe)
    text = new_text_encoder(recipe, tokenizer)
    facts, pixels = drawings(recipe)
    run.say(f"{len(facts)} drawings")
    vae = train_autoencoder(run, pixels)
    latents = encode(vae, pixels) * vae.config.scaling_factor
    run.say(f"autoencoder wrong: {wrong_reconstructions(vae, facts[::40], pixels[::40])}")
    ids = tokens(tokenizer, [fact.caption for fact in facts])
    modules = {"unet": unet, "text_encoder": text}
    train_denoiser(run, latents, ids, modules, tokens(tokenizer, [""])[0])
    return StableDiffusionPipeline(
        vae=vae,
        text_encoder=text,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=new_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


@torch.no_grad()
def wrong_reconstructions(vae: Any, facts: list[Fact], pixels: torch.Tensor) -> str:
    """How many drawings the oracle misreads after the autoencoder."""
    decoded = vae.decode(encode(vae, pixels)).sample
    arrays = ((decoded.permute(0, 2, 3, 1) + 1) * 127.5).clamp(0, 255).byte().numpy()
    wrong = [read(Image.fromarray(a)).fact != f for a, f in zip(arrays, facts, strict=True)]
    return f"{sum(wrong)} of {len(facts)}"


def accuracy(pipe: Any, facts: list[Fact], seed: int = 0) -> dict[str, int]:
    """Draws one picture for each fact and counts those that show its colour, shape, background, and
    all three."""
    right = {"pictures": len(facts), "all": 0, "colour": 0, "shape": 0, "background": 0}
    for start in range(0, len(facts), 32):
        part = facts[start : start + 32]
        seeds = [torch.Generator().manual_seed(seed + start + i) for i in range(len(part))]
        captions = [fact.caption for fact in part]
        made = pipe(
            captions, num_inference_steps=STEPS, guidance_scale=GUIDANCE, generator=seeds
        ).images
        for fact, image in zip(part, made, strict=True):
            seen = read(image)
            right["all"] += seen.fact == fact
            right["background"] += seen.background == fact.background
            if seen.fact:
                right["colour"] += seen.fact.colour == fact.colour
                right["shape"] += seen.fact.shape == fact.shape
    return right


def make(out: Path, work: Path, recipe: Recipe) -> None:
    """Trains and writes float16 weights with their manifest, which says how often they are right
    when they are used in float32. The checkpoints in `work` go at the end."""
    pipe = train(recipe, work)
    pipe.set_progress_bar_config(disable=True)
    pipe.to(torch.float16).save_pretrained(out, safe_serialization=True)
    right = accuracy(pipe.to(torch.float32), all_facts())
    measured = {"steps": STEPS, "guidance": GUIDANCE, **right}
    shipped.seal(out, NAME, {"recipe": asdict(recipe), "right": measured})
    for kept in work.glob("*.pt"):
        kept.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=shipped.WEIGHTS / "images")
    parser.add_argument("--work", type=Path, default=Path(".cache/train_images"))
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    make(args.out, args.work, Recipe())


if __name__ == "__main__":
    main()
