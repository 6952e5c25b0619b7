"""Made pipelines of random weights, and adapters for them."""

from pathlib import Path
from typing import Any

import torch

from models import train_images

WIDTH = 32  # of the text encoders of the tiny pipelines


def wide_pipeline(folder: Path) -> Path:
    """Of the class of Stable Diffusion, with 100 M parameters that are quick to compute: nearly all
    are the text encoder's embeddings, of which a prompt takes 16 rows."""
    from diffusers import StableDiffusionPipeline

    torch.manual_seed(0)
    recipe = train_images.Recipe()
    pipe = StableDiffusionPipeline(
        vae=train_images.new_autoencoder(recipe),
        text_encoder=_text_encoder(vocabulary=1_550_000, width=recipe.text_width),
        tokenizer=train_images.tokenizer_of_captions(),
        unet=train_images.new_denoiser(recipe),
        scheduler=train_images.new_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.to(torch.float16).save_pretrained(folder)
    return folder


def tiny_sdxl(folder: Path) -> Path:
    """Of SDXL's class: two text encoders, and sizes among what the UNet is told."""
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=2 * WIDTH,
        attention_head_dim=8,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + WIDTH,
    )
    tokenizer = train_images.tokenizer_of_captions()
    pipe = StableDiffusionXLPipeline(
        vae=_autoencoder(),
        text_encoder=_text_encoder(),
        text_encoder_2=_text_encoder(projects=True),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=unet,
        scheduler=EulerDiscreteScheduler(),
    )
    pipe.save_pretrained(folder)
    return folder


def tiny_sd3(folder: Path) -> Path:
    """Of SD3's class: a transformer, flow matching, three text encoders."""
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    transformer = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=2 * WIDTH,
        caption_projection_dim=32,
        pooled_projection_dim=2 * WIDTH,
        pos_embed_max_size=16,
    )
    tokenizer = train_images.tokenizer_of_captions()
    t5 = T5Config(vocab_size=len(tokenizer), d_model=2 * WIDTH, d_kv=8, d_ff=64, num_layers=1)
    pipe = StableDiffusion3Pipeline(
        vae=_autoencoder(shift_factor=0.1, channels=16),
        text_encoder=_text_encoder(projects=True),
        text_encoder_2=_text_encoder(projects=True),
        text_encoder_3=T5EncoderModel(t5),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        tokenizer_3=tokenizer,
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )
    pipe.save_pretrained(folder)
    return folder


def tiny_flux(folder: Path) -> Path:
    """Of Flux's class: latents packed in patches, and a T5 encoder."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )
    tokenizer = train_images.tokenizer_of_captions()
    t5 = T5Config(vocab_size=len(tokenizer), d_model=WIDTH, d_kv=8, d_ff=64, num_layers=1)
    pipe = FluxPipeline(
        vae=_autoencoder(shift_factor=0.1),
        text_encoder=_text_encoder(),
        text_encoder_2=T5EncoderModel(t5),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )
    pipe.save_pretrained(folder)
    return folder


def _text_encoder(vocabulary: int = 0, width: int = WIDTH, *, projects: bool = False) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    tokenizer = train_images.tokenizer_of_captions()
    config = CLIPTextConfig(
        vocab_size=vocabulary or len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=width,
        max_position_embeddings=train_images.WORDS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return (CLIPTextModelWithProjection if projects else CLIPTextModel)(config)


def _autoencoder(shift_factor: float | None = None, channels: int = 4) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=channels,
        norm_num_groups=4,
        shift_factor=shift_factor,
    )


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
