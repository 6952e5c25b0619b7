"""Which slab an engine keeps projected pictures in: the one of the node's pool, where it was lent
one, else one of its own, which ends with it. All else is the same (see picture_connector)."""

import hashlib
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import vllm
from vllm.config import ModelConfig, VllmConfig
from vllm.config.ec_manager_config import EncoderCacheManagerConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

from arbiter.pool import SlabUnusable, SlabView, create, layout
from arbiter.units import Bytes, Content
from deployments.config import model_files
from deployments.engines.protocol import Config
from deployments.engines.vllm.pictures.picture_cache import ENTRIES, ROW_EMBEDDINGS, TERM_S
from deployments.engines.vllm.pictures.picture_connector import PictureConnector, PicturesInUse
from deployments.engines.vllm.slabs import lent_slab

logger = init_logger(__name__)

# The prefix of the file's name. A slab of the pool has another, and is on no engine's account.
NAME = "own-pool"
# How a model's processor makes what its encoder reads of a picture.
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "config.json")


def arguments(config: Config) -> dict[str, Any]:
    """vLLM's arguments for a model that sees; empty for another one. `config["slabs"]["picture"]`
    may have the `path` of a slab that was lent, its `caps` by tenant, `entries` and `term_s`."""
    if not model_files.sees(Path(config["model"])):
        return {}
    slab = config.get("slabs", {}).get(Content.PICTURE, {})
    extra = {
        "slab": slab.get("path"),
        "entries": int(slab.get("entries", ENTRIES)),
        "term_s": float(slab.get("term_s", TERM_S)),
        "caps": slab.get("caps", {}),
    }
    return {
        "ec_manager_config": {
            "encoder_cache_manager_cls": f"{PicturesInUse.__module__}.{PicturesInUse.__name__}"
        },
        "ec_transfer_config": {
            "ec_connector": PictureConnector.__name__,
            "ec_connector_module_path": PictureConnector.__module__,
            "ec_role": "ec_both",
            "ec_connector_extra_config": extra,
        },
        "mm_processor_cache_gb": model_files.PROCESSED_GIB,
    }


def configure_connector(vllm_config: VllmConfig, config: Config) -> None:
    """Opens the slab, and names its namespace; or takes the connector away where vLLM has no use
    for one, so that vLLM keeps pictures by its own rules. Called before the core is forked."""
    if not has_slab(vllm_config):
        return
    lent_slab.refuse_embeddings(vllm_config, config)
    extra = vllm_config.ec_transfer_config.ec_connector_extra_config
    if cause := refusal(vllm_config):
        logger.warning("%s leaves its pictures to vLLM's cache: %s", config["model"], cause)
        vllm_config.ec_transfer_config = None
        vllm_config.ec_manager_config = EncoderCacheManagerConfig()
        return
    weights = lent_slab.weights_digest(Path(vllm_config.model_config.model))
    extra["namespace"] = _namespace(vllm_config, weights)
    extra["width"] = width(vllm_config.model_config)
    extra["is_lent"] = _is_lent(extra, weights, config["model"])
    extra["extent_bytes"] = layout.EXTENT_BYTES
    if not extra["is_lent"]:
        extra["slab"], extra["extent_bytes"] = _own(vllm_config, config), layout.PAGE_BYTES


def has_slab(vllm_config: VllmConfig) -> bool:
    """Whether its connector is ours; a person may have configured another one."""
    transfer = vllm_config.ec_transfer_config
    return transfer is not None and transfer.ec_connector == PictureConnector.__name__


def is_lent(vllm_config: VllmConfig) -> bool:
    """Whether the slab of an engine that `has_slab` is the node's, and not of its own."""
    return bool(vllm_config.ec_transfer_config.ec_connector_extra_config["is_lent"])


def refusal(vllm_config: VllmConfig) -> str | None:
    """Why vLLM 0.32 has no use for a connector, or would end with it, with this model."""
    model, parallel, lora = (
        vllm_config.model_config,
        vllm_config.parallel_config,
        vllm_config.lora_config,
    )
    sees = model.multimodal_config
    causes = {
        "it takes no pictures": sees is None or sees.get_limit_per_prompt("image") == 0,
        "it has an encoder of text or sound": model.is_encoder_decoder,
        "its adapters change its vision encoder": lora is not None
        and lora.enable_tower_connector_lora,
        "only the first of its pipeline's stages would tell what it copied": (
            parallel.pipeline_parallel_size > 1
        ),
        "it has several data-parallel cores, and a slab has one writer": (
            parallel.data_parallel_size > 1
        ),
    }
    return next((cause for cause, holds in causes.items() if holds), None)


def width(model: ModelConfig) -> int:
    """The width of an embedding as the encoder gives it: the text part's, as often again as
    DeepStack adds layers of the encoder. Embeddings of another width are not kept."""
    vision = getattr(model.hf_config, "vision_config", None)
    layers = getattr(vision, "deepstack_visual_indexes", None) or ()
    return int(model.get_inputs_embeds_size()) * (1 + len(layers))


def _is_lent(extra: dict[str, Any], weights: str | None, model: str) -> bool:
    """Takes the slab that it was lent, if it can be used."""
    if extra["slab"] is None:
        return False
    cause = lent_slab.hold_configured(extra)
    if cause is None and weights is None:
        cause = "its weights are no files on disk, so that nothing tells them apart"
    if cause is not None:
        logger.warning("%s keeps its pictures in a slab of its own: %s", model, cause)
    return cause is None


def _own(vllm_config: VllmConfig, config: Config) -> str:
    """Makes a slab that is charged to this process, with room for what the model's estimate counts.
    Returns its path, which holds as long as this process lives."""
    model = vllm_config.model_config
    arguments = config.get("engine_args", {})
    embeddings = int(arguments.get("max_num_batched_tokens", model_files.MOST_EMBEDDINGS))
    size = embeddings * width(model) * model.dtype.itemsize
    # Header and table come before the rows.
    capacity = Bytes((-(-size // layout.PAGE_BYTES) + 2) * layout.PAGE_BYTES)
    fd = create(Content.PICTURE, capacity, name=NAME)
    try:
        view = SlabView(fd)
    except SlabUnusable:
        os.close(fd)
        raise
    view.limit_bytes = capacity
    view.close()
    return f"/proc/{os.getpid()}/fd/{fd}"


def _namespace(vllm_config: VllmConfig, weights: str | None) -> str:
    """Hashes all that gives the numbers of an embedding their meaning."""
    facts = [weights, ROW_EMBEDDINGS, width(vllm_config.model_config), _facts(vllm_config)]
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _facts(vllm_config: VllmConfig) -> dict[str, Any]:
    model, sees = vllm_config.model_config, vllm_config.model_config.multimodal_config
    return {
        "vllm": vllm.__version__,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "device": current_platform.device_type,
        "weights": [str(model.dtype), str(model.quantization)],
        "shape": model.hf_config.to_dict(),
        "processor": [_text(Path(model.model) / name) for name in _PROCESSOR_FILES],
        "settings": [sees.mm_processor_kwargs, sees.media_io_kwargs],
        "ways": vllm_config.parallel_config.tensor_parallel_size,
    }


def _text(path: Path) -> str:
    """Returns the text of a file; empty where there is none."""
    return path.read_text() if path.is_file() else ""
