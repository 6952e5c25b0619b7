"""What is known of an engine without importing it, and what it needs before its first load."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from arbiter.core.types import Need
from arbiter.units import MIB, Bytes, Content
from deployments.config import engine_kinds
from deployments.config.capability_section import CapabilityConfig
from deployments.config.engine_kinds import EngineKind
from deployments.config.load_plan import plan
from deployments.config.model_section import ModelConfig
from deployments.config.schema import ConfigError
from tests.support.adapters import write
from tests.support.model_files import safetensors


def test_an_unknown_engine_is_named() -> None:
    with pytest.raises(ConfigError, match="no engine 'abacus'"):
        engine_kinds.engine_kind("abacus")


@pytest.mark.spec("H9")
def test_an_engine_that_is_a_program_is_there_when_its_program_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="needs 'llama-server' on the PATH"):
        engine_kinds.engine_kind("llama_server")
    monkeypatch.setenv("PATH", str(Path(__file__).parents[3] / "support" / "bin"))
    assert engine_kinds.engine_kind("llama_server").entry.endswith("llama_server:build")


def configured(source: Path, **more: object) -> ModelConfig:
    return ModelConfig.model_validate({"source": str(source), **more})


@pytest.mark.spec("A17")
def test_each_engine_estimates_by_the_arguments_that_it_knows(tmp_path: Path) -> None:
    model = write(tmp_path / "model", {"layers.0.up_proj": (64, 16)})
    given = {"folder": str(tmp_path / "in"), "max_rank": 8, "slots": 3}
    args = {"kv_cache_memory_bytes": "2 MiB"}
    config = configured(model, engine_args=args, adapters=given)
    plain = configured(model)
    more = {}
    for name in ("vllm", "sentence_transformers", "my.engine:build"):
        kind = engine_kinds.engine_kind(name)
        need, base = (kind.estimate(kind, str(model), one) for one in (config, plain))
        assert base.working_bytes == kind.working_bytes
        assert need.weights_bytes == need.host_bytes == base.weights_bytes
        assert need.least_bytes == (need.weights_bytes + 2 * MIB if kind.cache_bytes(args) else 0)
        more[name] = need.working_bytes - base.working_bytes
    slots_bytes = 2 * 3 * 8 * 2 * (64 + 8 + 8 + 16)  # twice 3 slots of rank 8, of 2 bytes each
    expected = 2 * MIB + slots_bytes
    assert more == {"vllm": expected, "sentence_transformers": 0, "my.engine:build": expected}


@pytest.mark.spec("A17", "H8")
def test_caches_of_pictures_are_on_the_ticket_of_a_model_that_sees(tmp_path: Path) -> None:
    safetensors(tmp_path, "a.safetensors", 100)
    args = {"max_num_batched_tokens": 1_000, "mm_processor_cache_gb": 0.5}
    kind = engine_kinds.engine_kind("vllm")

    def working_bytes(config: dict[str, object]) -> int:
        (tmp_path / "config.json").write_text(json.dumps(config))
        need = kind.estimate(kind, str(tmp_path), configured(tmp_path, engine_args=args))
        return need.working_bytes - kind.working_bytes

    assert working_bytes({"hidden_size": 64}) == 0
    seen = {"vision_config": {"hidden_size": 7}, "text_config": {"hidden_size": 64}}
    assert working_bytes(seen) == 512 * MIB + 1_000 * 64 * 4


@pytest.mark.spec("E1", "H8")
def test_model_that_sees_keeps_pictures_and_each_one_kv_unless_told(tmp_path: Path) -> None:
    kind, folder = engine_kinds.engine_kind("vllm"), str(tmp_path)
    silent = configured(tmp_path, keep_kv=False)
    assert kind.slab_contents(folder, configured(tmp_path)) == (Content.KV,)
    assert kind.slab_contents(folder, silent) == ()
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    assert kind.slab_contents(folder, configured(tmp_path)) == (Content.KV, Content.PICTURE)
    assert kind.slab_contents(folder, silent) == (Content.PICTURE,)
    assert engine_kinds.engine_kind("silero").slab_contents(folder, configured(tmp_path)) == ()


@pytest.mark.spec("B3", "A17")
@pytest.mark.parametrize("name", sorted(engine_kinds.ENGINES.keys() - {"llama_server"}))
def test_estimate_says_what_the_context_of_a_gpu_takes(name: str, tmp_path: Path) -> None:
    """Voices and voice activity compute on the processor, also beside a GPU."""
    safetensors(tmp_path, "a.safetensors", 100)
    kind = engine_kinds.engine_kind(name)
    need = kind.estimate(kind, str(tmp_path), configured(tmp_path))
    is_on_gpu = name not in ("vits", "kokoro", "silero")
    expected = engine_kinds.GPU_CONTEXT if is_on_gpu else kind.context_bytes
    assert need.on_gpu().context_bytes == expected
    assert need.context_bytes == kind.context_bytes


@pytest.mark.spec("A17", "H9")
def test_engine_may_bring_an_estimate_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an image engine would, whose workspace depends on the size of its images."""

    def by_size(kind: EngineKind, path: str, model: ModelConfig) -> Need:
        side = int(model.engine_args["image_size"])
        need = engine_kinds.weights_and_cache(kind, path, model)
        return replace(need, working_bytes=Bytes(side * side * 12))

    kind = EngineKind("my.images:build", (), Bytes(0), Bytes(0), estimate=by_size)
    monkeypatch.setitem(engine_kinds.ENGINES, "images", kind)
    safetensors(tmp_path, "a.safetensors", 100)
    models = {"m": {"source": str(tmp_path), "engine_args": {"image_size": 512}}}
    table = {"role": "image", "engine": "images", "models": models}
    need = plan("m", CapabilityConfig.model_validate(table)).need
    assert (need.weights_bytes, need.working_bytes) == (100, 512 * 512 * 12)


@pytest.mark.spec("A17", "H3", "H4")
def test_models_in_one_file_are_estimated_by_its_size(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x" * 1_000)
    (tmp_path / "vocabulary.txt").write_bytes(b"x" * 50)
    (tmp_path / "voice.onnx").write_bytes(b"x" * 300)
    for name, path, size_bytes in (
        ("faster_whisper", tmp_path, 1_000),
        ("vits", tmp_path, 300),
        ("vits", tmp_path / "voice.onnx", 300),
        ("vits", Path("espeak-ng"), 0),
    ):
        kind = engine_kinds.engine_kind(name)
        need = kind.estimate(kind, str(path), configured(path))
        assert need.weights_bytes == size_bytes
        assert (need.context_bytes, need.working_bytes) == (kind.context_bytes, kind.working_bytes)
        assert need.host_bytes == 0  # none of them sleeps
