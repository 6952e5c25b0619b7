"""Made pipelines of random weights, and adapters for them."""

from pathlib import Path
from typing import Any

import torch

from models import train_images


def wide_pipeline(folder: Path) -> Path:
    """Of the class of Stable Diffusion, with 100 M parameters that are quick to compute: nearly all
    are the text encoder's embeddings, of which a prompt takes 16 rows."""
    from diffusers import StableDiffusionPipeline
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    recipe = train_images.Recipe()
    tokenizer = train_images.tokenizer_of_captions()
    text = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=1_550_000,
            hidden_size=recipe.text_width,
            intermediate_size=2 * recipe.text_width,
            num_hidden_layers=1,
            num_attention_heads=2,
            projection_dim=recipe.text_width,
            max_position_embeddings=train_images.WORDS,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    pipe = StableDiffusionPipeline(
        vae=train_images.new_autoencoder(recipe),
        text_encoder=text,
        tokenizer=tokenizer,
        unet=train_images.new_denoiser(recipe),
        scheduler=train_images.new_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.to(torch.float16).save_pretrained(folder)
    return folder


def make_adapter(model: Path, folder: Path, seed: int, rank: int = 4) -> Path:
    """A LoRA of random matrices for the attention of a pipeline's UNet, in PEFT's form."""
    from diffusers import UNet2DConditionModel
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    unet: Any = UNet2DConditionModel.from_pretrained(model / "unet")
    targets = ["to_q", "to_k", "to_v"]
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, init_lora_weights=False)
    wrapped: Any = get_peft_model(unet, lora)
    wrapped.peft_config["default"].base_model_name_or_path = model.name
    wrapped.save_pretrained(folder)
    return folder
