"""Which device Whisper computes on."""

from typing import Any

import ctranslate2
import pytest

from deployments.engines.audio import faster_whisper
from deployments.engines.protocol import EngineLoadFailed

pytestmark = pytest.mark.spec("H3")


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a node with so many GPUs, with or without cuBLAS."""

    def make(gpus: int, cublas: bool) -> None:
        monkeypatch.setattr(ctranslate2, "get_cuda_device_count", lambda: gpus)
        monkeypatch.setattr(faster_whisper, "has_cublas", lambda: cublas)

    return make


def engine(**args: str) -> faster_whisper.WhisperEngine:
    return faster_whisper.build({"model": "m", "engine_args": args})


def test_gpu_is_taken_where_the_library_can_compute_on_it(
    node: Any, caplog: pytest.LogCaptureFixture
) -> None:
    node(1, True)
    assert (engine().device, engine().compute_type) == ("cuda", "float16")
    node(0, True)
    assert (engine().device, engine().compute_type) == ("cpu", "int8")
    assert not caplog.text
    node(1, False)
    assert (engine().device, engine().compute_type) == ("cpu", "int8")
    assert "pip install nvidia-cublas-cu12" in caplog.text


def test_gpu_that_was_asked_for_is_a_load_failure_where_no_product_can_be_computed(
    node: Any,
) -> None:
    node(1, False)
    assert engine(device="cpu").device == "cpu"
    with pytest.raises(EngineLoadFailed, match="nvidia-cublas-cu12"):
        engine(device="cuda")


def test_library_is_found_by_its_name_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, is_there in (("libc.so.6", True), ("libnowhere.so.12", False)):
        monkeypatch.setattr(faster_whisper, "CUBLAS", name)
        assert faster_whisper.has_cublas() is is_there, name
