"""Pipeline: a text-to-image pipeline of diffusers, and the others that share its modules."""

import copy
import gc
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from diffusers import (
    AutoPipelineForImage2Image,
    AutoPipelineForInpainting,
    AutoPipelineForText2Image,
    DiffusionPipeline,
)
from diffusers.utils import logging
from PIL import Image

from deployments.engines import host_copy
from deployments.engines.diffusers.adapters import LoadedAdapters
from deployments.engines.diffusers.batches import OnStep, Picture
from deployments.engines.diffusers.requests import Edit, Limits

STEPS, MAX_STEPS = 30, 100  # where `engine_args` say nothing
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Pipeline:
    """One loaded model. All methods but the constructor are called in the worker thread."""

    def __init__(self, path: str, arguments: Mapping[str, Any], threads: int, slots: int) -> None:
        self._path, self._arguments, self._threads = path, arguments, threads
        gpu = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = str(arguments.get("device") or gpu)
        self._slots = slots

    def load(self) -> None:
        """Raises what diffusers does. A second call, after a wake that did not verify, replaces
        what was loaded."""
        self._drop()
        # diffusers' warnings would quote the words of a prompt that its encoder leaves out.
        logging.set_verbosity_error()
        torch.set_num_threads(self._threads)
        # bfloat16 on a GPU: in float16 the autoencoder of SDXL overflows.
        default = "float32" if self.device == "cpu" else "bfloat16"
        self.pipe: Any = AutoPipelineForText2Image.from_pretrained(
            self._path,
            dtype=_DTYPES[self._arguments.get("dtype", default)],
            variant=self._arguments.get("variant"),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
        self.pipe.set_progress_bar_config(disable=True)
        self.pipe.to(self.device)
        # A copy, because tokens are counted beside the worker's calls, and a call of a tokenizer
        # sets how it pads.
        self._counting = copy.deepcopy(getattr(self.pipe, "tokenizer", None))
        if self._arguments.get("vae_tiling"):
            self.pipe.vae.enable_tiling()
        self.modules = torch.nn.ModuleList(
            part for part in self.pipe.components.values() if isinstance(part, torch.nn.Module)
        )
        host_copy.own(self.modules)
        self.adapters = LoadedAdapters(denoiser_of(self.pipe), self._slots)
        self._image2image = _sharing(AutoPipelineForImage2Image, self.pipe)
        self._inpainting = _sharing(AutoPipelineForInpainting, self.pipe)
        self.limits = self._limits()

    def _drop(self) -> None:
        """Frees the pipeline that is to be replaced, because the ticket has bytes for one alone."""
        for name in ("pipe", "modules", "adapters", "_image2image", "_inpainting"):
            vars(self).pop(name, None)
        gc.collect()  # its parts refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _limits(self) -> Limits:
        arguments, takes = self._arguments, _takes(self.pipe)
        width, height = _native_size(self.pipe)
        steps = int(arguments.get("steps", min(STEPS, arguments.get("max_steps", STEPS))))
        return Limits(
            width,
            height,
            # Twice, because transformers (SD3, Flux) see latents in patches of two.
            2 * self.pipe.vae_scale_factor,
            int(arguments.get("max_pixels", width * height)),
            steps,
            max(steps, int(arguments.get("max_steps", MAX_STEPS))),
            arguments.get("guidance"),
            takes_guidance="guidance_scale" in takes,
            # Flux takes a negative prompt only with a guidance of its own, at twice the time.
            takes_negative="negative_prompt" in takes and "true_cfg_scale" not in takes,
            can_edit=self._image2image is not None,
            can_inpaint=self._inpainting is not None,
        )

    def draw(self, batch: Sequence[Picture], on_step: OnStep) -> list[Image.Image]:
        """One picture for each of the batch, which has one setting. Raises what `on_step` does."""
        setting = batch[0].request.setting
        pipe, how = self._chosen(setting.edit, setting.width, setting.height, len(batch))
        how["prompt"] = [picture.request.prompt for picture in batch]
        how["generator"] = [torch.Generator().manual_seed(picture.seed) for picture in batch]
        how["num_inference_steps"] = setting.steps
        how["callback_on_step_end"] = self._callback(on_step, setting.width, setting.height)
        if setting.guidance is not None:
            how["guidance_scale"] = setting.guidance
        if self.limits.takes_negative:
            how["negative_prompt"] = [picture.request.negative for picture in batch]
        self.adapters.use(setting.adapter)
        parameters = _takes(pipe)
        with torch.inference_mode():
            images = pipe(
                **{name: value for name, value in how.items() if name in parameters}
            ).images
        edit = setting.edit
        if edit is None or edit.mask is None:
            return list(images)
        # What the mask leaves is the upload's own, to the pixel: an autoencoder would change it.
        return [Image.composite(image, edit.image, edit.mask) for image in images]

    def _chosen(
        self, edit: Edit | None, width: int, height: int, count: int
    ) -> tuple[Any, dict[str, Any]]:
        """The pipeline for text, a picture or a picture with a mask, and its own arguments."""
        how: dict[str, Any] = {"width": width, "height": height}
        if edit is None:
            return self.pipe, how
        how |= {"image": [edit.image] * count, "strength": edit.strength}
        if edit.mask is None:
            return self._image2image, how
        return self._inpainting, how | {"mask_image": [edit.mask] * count}

    def _callback(self, on_step: OnStep, width: int, height: int) -> Callable[..., dict[str, Any]]:
        """`callback_on_step_end`. An exception in it ends the call between two steps."""

        def called(pipe: Any, index: int, _: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            latents = tensors["latents"]
            on_step(index + 1, pipe.num_timesteps, lambda: self._decoded(latents, width, height))
            return tensors

        return called

    def _decoded(self, latents: Any, width: int, height: int) -> list[Image.Image] | None:
        """Pictures of latents as they are; None where this kind of pipeline keeps them in a form
        that only its own call can read."""
        vae = self.pipe.vae
        if latents.ndim != 4 and hasattr(self.pipe, "_unpack_latents"):
            latents = self.pipe._unpack_latents(latents, height, width, self.pipe.vae_scale_factor)
        if latents.ndim != 4:
            return None
        shift = getattr(vae.config, "shift_factor", None) or 0.0
        scaled = (latents / vae.config.scaling_factor + shift).to(vae.dtype)
        pixels = vae.decode(scaled, return_dict=False)[0]
        return list(self.pipe.image_processor.postprocess(pixels, output_type="pil"))

    def probe(self) -> str:
        """Two steps of one small picture: equal on one device whenever the weights are."""
        self.adapters.use("")
        side = 8 * self.pipe.vae_scale_factor
        with torch.inference_mode():
            latents = self.pipe(
                "a probe",
                width=side,
                height=side,
                num_inference_steps=2,
                generator=torch.Generator().manual_seed(0),
                output_type="latent",
            ).images
        on_cpu = latents.float().cpu()
        if self.device == "cpu":
            return str(on_cpu.numpy().tobytes().hex())
        return str(on_cpu.round(decimals=2).tolist())

    def forget_tenant(self, tenant: str) -> None:
        self.adapters.forget(tenant)

    def tokens(self, prompt: str) -> int:
        """Counts tokens of the first text encoder, its special ones included, whether or not it
        reads all; 0 where diffusers has the encoder under a name of its own."""
        tokenizer = self._counting
        return len(tokenizer(prompt, truncation=False).input_ids) if tokenizer else 0


def denoiser_of(pipe: Any) -> Any:
    """The module that adapters change: a UNet, or a transformer."""
    return getattr(pipe, "unet", None) or pipe.transformer


def _sharing(kind: Any, pipe: DiffusionPipeline) -> Any:
    """Another pipeline over the same modules, without a byte more; None where diffusers has none
    for this model."""
    try:
        other = kind.from_pipe(pipe)
    except ValueError:
        return None
    other.set_progress_bar_config(disable=True)
    return other


def _takes(pipe: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(type(pipe).__call__).parameters


def _native_size(pipe: Any) -> tuple[int, int]:
    """Width and height in pixels that the model was trained for."""
    latent = getattr(pipe, "default_sample_size", None) or denoiser_of(pipe).config.sample_size
    height, width = latent if isinstance(latent, list | tuple) else (latent, latent)
    return width * pipe.vae_scale_factor, height * pipe.vae_scale_factor
