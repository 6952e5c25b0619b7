"""What a zygote imports so that no engine of pictures has to: name it in `--preload`.

diffusers imports its modules when they are first named, so `import diffusers` alone preloads
nothing.
"""

import importlib

MODULES = (
    "PIL.JpegImagePlugin",
    "PIL.PngImagePlugin",
    "PIL.WebPImagePlugin",
    "deployments.engines.diffusers.engine",
    "diffusers.models.autoencoders.autoencoder_kl",
    "diffusers.models.autoencoders.autoencoder_tiny",
    "diffusers.models.unets.unet_2d_condition",
    "diffusers.pipelines.auto_pipeline",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion_img2img",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion_inpaint",
    "diffusers.schedulers.scheduling_ddim",
    "diffusers.schedulers.scheduling_euler_discrete",
    "peft",
    "starlette.formparsers",
    "transformers.models.clip.modeling_clip",
    "transformers.models.clip.tokenization_clip",
)

for module in MODULES:
    importlib.import_module(module)
