"""Which models keep pictures in a slab, and what tells one slab's pictures from another's."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.engines.vllm.pictures import picture_slab


def configured(**changes: Any) -> Any:
    facts: dict[str, Any] = {
        "dtype": "bfloat16",
        "quantization": None,
        "model": "/nowhere",
        "hf_config": {"layers": 4},
        "is_encoder_decoder": False,
        "mm_processor_kwargs": None,
        "media_io_kwargs": {},
        "pictures": 1,
        "width": 64,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "enable_tower_connector_lora": False,
    } | changes
    sees = SimpleNamespace(**facts, get_limit_per_prompt=lambda modality: facts["pictures"])
    shape = SimpleNamespace(to_dict=lambda: facts["hf_config"], vision_config=None)
    every = SimpleNamespace(
        **facts | {"hf_config": shape},
        multimodal_config=sees,
        get_inputs_embeds_size=lambda: facts["width"],
    )
    return SimpleNamespace(model_config=every, parallel_config=every, lora_config=every)


@pytest.mark.spec("H8", "E2")
@pytest.mark.parametrize(
    "fact",
    [
        "dtype",
        "quantization",
        "hf_config",
        "mm_processor_kwargs",
        "media_io_kwargs",
        "tensor_parallel_size",
        "width",
        "weights",
        "processor",
        "vllm",
        "device",
    ],
)
def test_namespace_changes_with_each_fact_of_an_engine(
    fact: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def namespace(weights: str = "w", **changes: Any) -> str:
        return picture_slab._namespace(configured(model=str(tmp_path), **changes), weights)

    before = namespace()
    assert namespace() == before
    match fact:
        case "weights":
            assert namespace("others") != before
            return
        case "processor":
            (tmp_path / "preprocessor_config.json").write_text("{}")
        case "vllm":
            monkeypatch.setattr(picture_slab.vllm, "__version__", "0")
        case "device":
            other = SimpleNamespace(device_type="other")
            monkeypatch.setattr(picture_slab, "current_platform", other)
        case "width":
            assert namespace(width=65) != before
            return
        case _:
            assert namespace(**{fact: "other"}) != before
            return
    assert namespace() != before


@pytest.mark.spec("H8")
@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"pictures": 0}, "takes no pictures"),
        ({"is_encoder_decoder": True}, "encoder of text"),
        ({"enable_tower_connector_lora": True}, "adapters"),
        ({"pipeline_parallel_size": 2}, "stages"),
        ({"data_parallel_size": 2}, "one writer"),
    ],
)
def test_models_that_cannot_keep_pictures_say_why(change: dict[str, Any], cause: str) -> None:
    assert picture_slab.refusal(configured()) is None
    assert cause in (picture_slab.refusal(configured(**change)) or "")


def test_deepstack_makes_embeddings_wider() -> None:
    model = configured().model_config
    assert picture_slab.width(model) == 64
    model.hf_config.vision_config = SimpleNamespace(deepstack_visual_indexes=[8, 16, 24])
    assert picture_slab.width(model) == 4 * 64
