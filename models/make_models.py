"""Make the models the embedded default serves: seeded, tiny, made here in seconds, no download.

    python -m models.make_models [--random] [--retrain] [--folder F]

They answer through the same engines, routes and memory as real ones, and say nothing sensible.
Those in models/weights are trained, and unpacked here (models.shipped). Each lies in F/NAME with
its LoRA adapters in F/NAME-adapters/aN; F is $ARBITER_MODELS or
~/.cache/serve-arbiter/models. A model that is there in this version is left alone.
"""

import argparse
import json
import os
import pydoc_data.topics
import shutil
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deployments import progress
from deployments.config.environment import Environment
from models import packaged, shipped, vllm_classes

VERSION = 1  # part of the stamp: raise it when what is made changes
STAMP = "made.json"

# Heads of 64: the attention of vLLM's CPU build takes 32, 64 and more, not 16.
HEAD_DIM = 64
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama of random weights, and how many adapters to make for it."""

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    adapters: int
    ranks: tuple[int, ...] = (8, 16)
    vocabulary: int = 2048
    positions: int = 4096
    seed: int = 0


TINY = Shape("tiny-chat", layers=4, hidden=256, inner=704, heads=4, kv_heads=2, adapters=8)
# 98 M parameters. An engine process holds 100-170 MB that no sleep gives back (the more, the more
# kinds of batches it has seen), so a model that is to sleep for real needs ten times that awake.
# Measured after mixed traffic: base alone with 1 GiB of KV cache 1.36 -> 0.13 GB; with four
# adapters and 1.5 GiB 1.99 -> 0.17 GB. tiny-chat and the embedding model cannot: gone is theirs.
MEDIUM = Shape("medium-chat", layers=8, hidden=1024, inner=2816, heads=16, kv_heads=8, adapters=4)
# 214 M parameters, 428 MB in bf16: heavy enough that an engine's work outweighs its plumbing.
MID = Shape("mid-chat", 8, 1536, 4096, heads=24, kv_heads=8, adapters=4, ranks=(16,))
RANDOM = (TINY, MEDIUM)


def default_folder() -> Path:
    return Environment().models


def stamp_of(shape: Shape) -> dict[str, Any]:
    python = ".".join(map(str, sys.version_info[:2]))  # the tokenizer learns from its manual
    return {"version": VERSION, "python": python, "shape": json.loads(json.dumps(asdict(shape)))}


def is_made(folder: Path, shape: Shape) -> bool:
    try:
        return bool(json.loads((folder / shape.name / STAMP).read_text()) == stamp_of(shape))
    except (OSError, ValueError):
        return False


def make(folder: Path, shape: Shape) -> Path:
    """The model's folder, made now unless it is there. A reader never sees half of one."""
    target = folder / shape.name
    if is_made(folder, shape):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".making-") as scratch:
        model, adapters = Path(scratch, "model"), Path(scratch, "adapters")
        write_tokenizer(model, shape)
        _write_weights(model, adapters, shape)
        (model / STAMP).write_text(json.dumps(stamp_of(shape)))
        for made, place in ((adapters, folder / f"{shape.name}-adapters"), (model, target)):
            shutil.rmtree(place, ignore_errors=True)
            made.rename(place)
    return target


def write_tokenizer(model: Path, shape: Shape) -> None:
    """Byte-level BPE learnt from the manual that ships inside Python."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocabulary,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)


def _write_weights(model: Path, adapters: Path, shape: Shape) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    # PEFT asks the hub whether the base is known there, and warns when it may not.
    warnings.filterwarnings("ignore", module="peft")
    torch.manual_seed(shape.seed)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=shape.positions,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        # Wider than the usual 0.02: logits far apart, so that greedy tokens survive rounding.
        initializer_range=0.06,
    )
    base: Any = LlamaForCausalLM(config)
    base = base.to(torch.bfloat16)
    base.save_pretrained(model)
    adapters.mkdir()
    for number in range(shape.adapters):
        torch.manual_seed(shape.seed + 1 + number)
        rank = shape.ranks[number % len(shape.ranks)]
        lora = LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules=PROJECTIONS, init_lora_weights=False
        )
        wrapped: Any = get_peft_model(base, lora)
        wrapped.peft_config["default"].base_model_name_or_path = shape.name
        wrapped.to(torch.bfloat16).save_pretrained(adapters / f"a{number}")
        base = wrapped.unload()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=default_folder())
    parser.add_argument("--random", action="store_true", help="also those of random weights")
    parser.add_argument("--retrain", action="store_true", help="train again what is carried")
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    steps = progress.Steps()
    with steps.step("models of packages, checked") as note:
        for model in packaged.MODELS:
            note(str(packaged.check(model)))
        note(str(packaged.make_vad(args.folder)))
        note(str(packaged.make_asr(args.folder)))
    for shape in (*RANDOM, MID) if args.random else ():
        with steps.step(f"model {shape.name}") as note:
            note(str(make(args.folder, shape)))
    with steps.step("models trained here, unpacked") as note:
        note(", ".join(folder.name for folder in shipped.unpack_all(args.folder)))
    if args.retrain:
        with steps.step("models trained again"):
            retrain(args.folder)
    with steps.step("models as vLLM knows them"):
        vllm_classes.inspect(args.folder)


def retrain(folder: Path) -> None:
    """Trains by their recipes what the repository carries; the weights replace those in `folder`
    until the next `make models`."""
    from models import train_chat, train_chat_adapters, train_images, train_vision

    work = folder / ".retrained"
    train_images.make(work / "images", work / "checkpoints", train_images.Recipe())
    train_vision.make(work / "vision")
    train_chat.make(work / "chat", train_chat.Recipe())
    adapters = train_chat_adapters.Recipe()
    train_chat_adapters.make(work / "chat", work / "chat_adapters", adapters)
    for trained in ("images", "vision", "chat", "chat_adapters"):
        print(shipped.unpack(work / trained, folder))


if __name__ == "__main__":
    main()
