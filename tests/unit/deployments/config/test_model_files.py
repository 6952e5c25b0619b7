"""What a model's files say of its bytes."""

import json
import struct
from pathlib import Path

import pytest

from deployments.config import model_files
from deployments.config.schema import ConfigError
from tests.support.model_files import safetensors


@pytest.mark.spec("A17")
def test_weights_are_the_sum_over_all_headers(tmp_path: Path) -> None:
    safetensors(tmp_path, "a.safetensors", 100, 200)
    safetensors(tmp_path, "b.safetensors", 50)
    assert model_files.weights_bytes(tmp_path) == 350
    assert model_files.weights_bytes(tmp_path / "b.safetensors") == 50


@pytest.mark.spec("A17")
def test_weights_of_a_pipeline_are_those_of_the_folders_that_its_index_names(
    tmp_path: Path,
) -> None:
    parts = {"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "UNet"]}
    parts |= {"vae": ["diffusers", "AutoencoderKL"], "scheduler": ["diffusers", "DDIM"]}
    (tmp_path / "model_index.json").write_text(json.dumps(parts))
    for name, size in {"unet": 500, "vae": 70, "safety_checker": 9}.items():
        (tmp_path / name).mkdir()
        safetensors(tmp_path / name, "diffusion_model.safetensors", size)
    safetensors(tmp_path / "unet", "diffusion_model.fp16.safetensors", 250)  # the same again
    safetensors(tmp_path, "whole.safetensors", 570)  # and once more, in one file
    assert model_files.weights_bytes(tmp_path) == 570
    (tmp_path / "model_index.json").write_text("[1]")
    with pytest.raises(ConfigError, match="not the index of a pipeline"):
        model_files.weights_bytes(tmp_path)


@pytest.mark.spec("A17")
def test_weights_in_nested_folders_count_where_the_top_has_none(tmp_path: Path) -> None:
    (tmp_path / "0_Transformer").mkdir()
    safetensors(tmp_path / "0_Transformer", "model-00001-of-00002.safetensors", 100)
    safetensors(tmp_path / "0_Transformer", "model-00002-of-00002.safetensors", 20)
    assert model_files.weights_bytes(tmp_path) == 120
    safetensors(tmp_path, "model.safetensors", 7)  # the nested ones are another form of it
    assert model_files.weights_bytes(tmp_path) == 7


@pytest.mark.spec("A17")
def test_weights_that_an_index_lists_count_and_no_other_form_beside_them(tmp_path: Path) -> None:
    for name, size in {"model-1.safetensors": 30, "model-2.safetensors": 12}.items():
        safetensors(tmp_path, name, size)
    safetensors(tmp_path, "consolidated.safetensors", 42)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    )
    assert model_files.weights_bytes(tmp_path) == 42
    for broken in ("[1]", "{}", '{"weight_map": [1]}', "no json"):
        index.write_text(broken)
        with pytest.raises(ConfigError, match="not the index of a model"):
            model_files.weights_bytes(tmp_path)


def test_a_folder_without_tensors_asks_for_a_need(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give the model a `need`"):
        model_files.weights_bytes(tmp_path)


@pytest.mark.spec("A17")
def test_weights_without_headers_are_estimated_from_the_files_then_from_the_name(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "toy-2B-int8"
    (folder / "unet").mkdir(parents=True)
    assert (
        model_files.weights_bytes(folder)
        == model_files.weights_bytes(Path("org/toy-2B-int8"))
        == 2.24e9
    )
    (folder / "unet" / "model.gguf").write_bytes(bytes(1000))
    assert model_files.weights_bytes(folder) == 1100
    (tmp_path / "toy.gguf").write_bytes(bytes(1000))
    assert model_files.weights_bytes(tmp_path / "toy.gguf") == 1100


def test_a_header_longer_than_the_format_allows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", 1 << 60))
    with pytest.raises(ConfigError, match="not a safetensors file"):
        model_files.weights_bytes(tmp_path)


@pytest.mark.spec("L2", "L3")
@pytest.mark.parametrize(
    "raw",
    [b"", b"\x05", b"\x02\0\0\0\0\0\0\0{", b"\x02\0\0\0\0\0\0\0[]", b"\x05\0\0\0\0\0\0\0null!"]
    + [len(b).to_bytes(8, "little") + b for b in (b'{"t": 1}', b'{"t": {"data_offsets": [1]}}')],
)
def test_a_broken_header_is_named_with_its_file(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(raw)
    with pytest.raises(ConfigError, match=r"a\.safetensors.*not a safetensors file"):
        model_files.weights_bytes(tmp_path)
