"""`arbiter init` writes what `arbiter check` passes, and names what is wrong with a source."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from arbiter.core.settings import Settings
from arbiter.core.tickets.budget import budget_of
from arbiter.core.types import DeviceKind
from arbiter.node import nvml, procfs
from arbiter.node.nvml import Card
from arbiter.units import GIB, MIB, Bytes
from deployments.cli.cluster import config_text
from deployments.config.config_file import check_file
from deployments.config.engine_kinds import ENGINES
from deployments.config.fields import parse_size
from tests.support.command_line import Run

LLAMA = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 1024}
Folder = Callable[..., Path]


class Cards:
    """GPUs of these sizes."""

    def __init__(self, *sizes_gib: int) -> None:
        self.sizes = sizes_gib

    def count(self) -> int:
        return len(self.sizes)

    def card(self, index: int) -> Card:
        return Card("NVIDIA Test", f"u{index}", Bytes(self.sizes[index] * GIB))


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Of 16 GiB of RAM and no GPU, offline, with the models made, unless a test says otherwise."""

    def has(*gpus_gib: int, ram_gib: int = 16) -> None:
        monkeypatch.setattr(nvml, "find_gpus", lambda: Cards(*gpus_gib))
        monkeypatch.setattr(procfs, "ram", lambda: (Bytes(ram_gib * GIB), Bytes(ram_gib * GIB)))

    has()
    for name in ("small-chat", "tiny-describe", "silero-vad", "tiny-draw", "tiny.en"):
        tensors = {"q.weight": np.zeros((8, 8), np.float32)}
        (tmp_path / "models" / name).mkdir(parents=True)
        save_file(tensors, tmp_path / "models" / name / "model.safetensors")
    monkeypatch.setenv("ARBITER_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub-cache"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return has


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A folder with this config.json, files, and MiB of weights."""

    def make(name: str = "mine", config: Any = LLAMA, mib: int = 2, **files: str) -> Path:
        made = tmp_path / name
        made.mkdir(parents=True)
        if config is not None:
            (made / "config.json").write_text(json.dumps(config))
        for file, text in files.items():
            (made / file.replace("__", ".")).write_text(text)
        if mib:
            save_file({"w": np.zeros(mib * MIB, np.uint8)}, made / "model.safetensors")
        return made

    return make


@pytest.fixture
def made(run: Run, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The table that these words write, which `arbiter check` passes."""

    def make(*words: str) -> dict[str, Any]:
        file = tmp_path / "written.yaml"
        done = run("init", str(file), *words)
        assert done.exit_code == 0, done.stderr
        checked = run("check", str(file))
        assert checked.exit_code == 0, checked.stderr
        assert len(yaml.safe_load(file.read_text())["applications"]) == 1
        found: dict[str, Any] = check_file(file).model_dump(mode="json", exclude_unset=True)
        return found

    return make


def shipped(name: str) -> dict[str, Any]:
    found: dict[str, Any] = check_file(config_text.ROOT / name).model_dump(
        mode="json", exclude_unset=True
    )
    return found


@pytest.mark.spec("M2")
def test_machine_without_a_gpu_gets_the_capabilities_of_make_serve(
    made: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    table = made()
    assert table["capabilities"] == shipped("serve_config.yaml")["capabilities"]
    assert table["arbiter"]["arenas"]["cpu"] < 8 * GIB
    text = (tmp_path / "written.yaml").read_text()
    assert "16.0 GiB of RAM" in text and "# While resident, about: small-chat " in text
    assert "# Knows this system and does small tasks." in text


@pytest.mark.spec("M2")
def test_machine_with_two_gpus_gets_the_models_of_a_hub(
    made: Callable[..., dict[str, Any]], machine: Callable[..., None]
) -> None:
    machine(24, 24, ram_gib=128)
    table = made()
    assert table["capabilities"] == shipped("serve_config.gpu.yaml")["capabilities"]
    assert table["arbiter"]["arenas"] == {"host": 32 * GIB}


@pytest.mark.spec("M2")
def test_machine_with_a_gpu_of_80_gb_gets_the_models_for_it(
    made: Callable[..., dict[str, Any]], machine: Callable[..., None]
) -> None:
    machine(79, ram_gib=128)
    assert made()["capabilities"] == shipped("serve_config.gpu80.yaml")["capabilities"]


@pytest.mark.spec("M2")
@pytest.mark.parametrize(
    ("file", "card_mib"),
    [("serve_config.gpu.yaml", 24_564), ("serve_config.gpu80.yaml", 81_559)],
    ids=["RTX 4090", "H100"],
)
def test_each_shipped_model_for_gpus_fits_one_card(file: str, card_mib: int) -> None:
    card, drivers_own = Bytes(card_mib * MIB), 645 * MIB  # what an H200 keeps to itself
    room = budget_of(card, DeviceKind.GPU, Settings()) - drivers_own
    table = check_file(config_text.ROOT / file)
    for capability in table.capabilities.values():
        for name, model in capability.models.items():
            assert model.need is not None
            assert model.need.as_need().device_bytes <= room, name


@pytest.mark.spec("M2")
def test_shipped_models_that_do_not_fit_are_left_out_by_name(
    made: Callable[..., dict[str, Any]], machine: Callable[..., None], tmp_path: Path
) -> None:
    machine(16)
    capabilities = made()["capabilities"]
    assert list(capabilities["chat"]["models"]) == ["qwen3-4b"]
    assert (
        "# Left out: qwen3-8b needs 17.8 GiB, of 12.5 GiB."
        in (tmp_path / "written.yaml").read_text()
    )


@pytest.mark.spec("M2")
def test_cpu_and_capabilities_are_chosen_by_hand(
    made: Callable[..., dict[str, Any]], machine: Callable[..., None]
) -> None:
    machine(24)
    table = made("--cpu", "--capabilities", "chat, tts")
    assert {name: list(row["models"]) for name, row in table["capabilities"].items()} == {
        "chat": ["small-chat"], "tts": ["joe"],
    }  # fmt: skip
    assert "pipelines" not in table["arbiter"]


@pytest.mark.spec("M2", "A17")
def test_folder_is_a_model_of_the_capability_that_its_files_name_with_the_size_of_its_headers(
    made: Callable[..., dict[str, Any]], folder: Folder, tmp_path: Path
) -> None:
    see = {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}}
    rank = {"architectures": ["BertForSequenceClassification"]}
    sources = {
        "chat": folder("a", mib=3),
        "vision": folder("b", see),
        "rerank": folder("c", rank),
        "embedding": folder("d", {"architectures": ["XLMRobertaModel"]}),
        "image": folder("e", None, model_index__json='{"unet": ["x", "y"]}'),
    }
    unet = sources["image"] / "unet"
    unet.mkdir()
    (sources["image"] / "model.safetensors").rename(unet / "model.safetensors")
    words = [w for c, path in sources.items() for w in ("--model", f"my-{c}={path}")]
    table = made(*words)
    for name, path in sources.items():
        [(model, row)] = table["capabilities"][name]["models"].items()
        assert (model, row["source"]) == (f"my-{name}", str(path))
    chat = table["capabilities"]["chat"]["models"]["my-chat"]
    assert chat["engine_args"]["max_model_len"] == 1024
    text = (tmp_path / "written.yaml").read_text()
    assert "# LlamaForCausalLM; 3.0 MiB of weights by its headers" in text
    assert list(table["capabilities"]["asr"]["models"]) == ["tiny.en"]


@pytest.mark.spec("M2")
def test_hub_id_has_the_size_of_its_copy_in_the_cache(
    made: Callable[..., dict[str, Any]], folder: Folder, machine: Callable[..., None]
) -> None:
    machine(24)
    kept = folder("hub-cache/hub/models--org--chat/snapshots/abc", mib=5).parents[1]
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("abc")
    row = made("--model", "mine=org/chat")["capabilities"]["chat"]["models"]["mine"]
    assert (row["source"], row["need"]["weights"]) == ("org/chat", 5 * MIB)


@pytest.mark.spec("M2")
def test_hub_id_of_which_nothing_is_known_says_that_its_size_is_learned(
    made: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    row = made("--model", "chat:mine=org/unheard")["capabilities"]["chat"]["models"]["mine"]
    assert row["source"] == "org/unheard" and row["need"]["weights"] > 0
    assert "its size is learned at the first load" in (tmp_path / "written.yaml").read_text()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What it says of org/chat; it has no other model."""
    says: dict[str, Any] = {"config": LLAMA}

    def get(url: str, **how: Any) -> httpx.Response:
        found = url == "https://hub.test/api/models/org/chat"
        return httpx.Response(200 if found else 404, json=says if found else {})

    monkeypatch.setattr(httpx, "get", get)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.test")
    return says


@pytest.mark.spec("M2")
@pytest.mark.parametrize("body", ["<html>log in</html>", "[]"])
def test_answer_that_is_no_hubs_is_that_of_no_hub(
    run: Run, hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    monkeypatch.setattr(httpx, "get", lambda url, **how: httpx.Response(200, text=body))
    failed = run("init", "other.yaml", "--model", "mine=org/chat")
    assert failed.exit_code == 1
    assert "org/chat: it is not in the cache, and no hub answers" in failed.stderr


SIBLINGS = [
    {"rfilename": "model.safetensors", "size": 20 * MIB},
    {"rfilename": "consolidated.safetensors", "size": 20 * MIB},
    {"rfilename": "model.gguf", "size": 4 * MIB},
    {"rfilename": "README.md", "size": 4 * MIB},
]


@pytest.mark.spec("M2", "A17")
@pytest.mark.parametrize(
    ("said", "weights_mib", "words"),
    [
        (
            {"safetensors": {"parameters": {"BF16": 8 * MIB, "F32": 1 * MIB}, "total": 9 * MIB}},
            20,
            "its headers",
        ),
        ({}, 26, "the sizes of its files"),  # 1.3 of the file
        ({"safetensors": {"parameters": {"F4": 8 * MIB}}}, 26, "the sizes of its files"),
        ({"safetensors": None}, 26, "the sizes of its files"),
    ],
)
def test_model_of_a_hub_has_the_size_of_its_headers_else_of_its_files_as_loaded(
    made: Callable[..., dict[str, Any]],
    hub: dict[str, Any],
    tmp_path: Path,
    said: dict[str, Any],
    weights_mib: int,
    words: str,
) -> None:
    hub |= {"siblings": SIBLINGS} | said
    row = made("--model", "mine=org/chat")["capabilities"]["chat"]["models"]["mine"]
    assert row["need"]["weights"] == weights_mib * MIB
    kind = ENGINES["vllm"]
    cache_bytes = row["engine_args"]["kv_cache_memory_bytes"]
    assert row["need"]["context"] == kind.context_bytes
    assert row["need"]["working"] == parse_size(cache_bytes) + kind.working_bytes
    assert f"MiB of weights by {words}" in (tmp_path / "written.yaml").read_text()


@pytest.mark.spec("M2")
def test_model_that_a_hub_does_not_have_is_refused_by_name(run: Run, hub: dict[str, Any]) -> None:
    failed = run("init", "other.yaml", "--model", "mine=org/chta")
    assert "mine: https://hub.test has no model org/chta" in failed.stderr


@pytest.mark.spec("M2")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--model", "mine=/no/such"), "mine: no folder /no/such"),
        (("--model", "mine=nonsense"), "mine: no folder nonsense, and no id of a hub"),
        (("--model", "mine"), "write NAME=SOURCE"),
        (("--model", "cat:mine=a/b"), "no capability 'cat' of chat, embedding"),
        (("--model", "mine=org/x"), "org/x: it is not in the cache, and no hub answers"),
        (("--model", "mine=made:none"), "make it with `make models`"),
        (("--model", "mine={}/t5"), "T5ForConditionalGeneration, of which no capability is known"),
        (("--model", "mine={}/whisper"), "ct2-transformers-converter"),
        (("--model", "mine={}/empty"), "no config.json among notes"),
        (("--model", "mine={}/weightless"), "has no weights"),
        (("--model", "mine={}/broken"), "not a safetensors file"),
        (("--model", "tts:mine={}/good"), "is for chat (LlamaForCausalLM), not for tts"),
        (("--model", "a={}/good", "--capabilities", "tts"), "which --capabilities leaves out"),
        (("--model", "a={}/good", "--model", "a={}/good"), "given twice"),
        (("--capabilities", "chat,tss"), "no 'tss'; there is: chat, "),
        (("--gpu",), "NVML finds no GPU here"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else "",
)
def test_what_is_wrong_is_named_and_nothing_is_written(
    words: tuple[str, ...], says: str, run: Run, folder: Folder, tmp_path: Path
) -> None:
    folder("good")
    folder("t5", {"architectures": ["T5ForConditionalGeneration"]})
    folder("whisper", {"architectures": ["WhisperForConditionalGeneration"]})
    folder("empty", None, mib=0, notes="")
    folder("weightless", mib=0)
    folder("broken", mib=0, model__safetensors="xxxxxxxxxxxx")
    file = tmp_path / "written.yaml"
    failed = run("init", str(file), *(word.format(tmp_path) for word in words))
    assert failed.exit_code == 1
    assert says in failed.stderr
    assert not file.exists()


@pytest.mark.spec("M2")
def test_model_that_is_larger_than_the_machine_is_refused(
    run: Run, folder: Folder, machine: Callable[..., None], tmp_path: Path
) -> None:
    machine(1)
    failed = run("init", str(tmp_path / "x.yaml"), "--model", f"mine={folder(mib=2)}")
    assert "mine needs " in failed.stderr and "that a device lends here" in failed.stderr


@pytest.mark.spec("M2")
def test_file_that_is_there_is_replaced_only_by_force(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "serve_config.yaml"
    file.write_text("mine")
    failed = run("init", str(file))
    assert failed.exit_code == 1 and "--force" in failed.stderr
    assert file.read_text() == "mine"
    assert run("init", str(file), "--force", "--port", "8123").exit_code == 0
    assert yaml.safe_load(file.read_text())["http_options"]["port"] == 8123


@pytest.mark.parametrize(
    "name", ["serve_config.yaml", "serve_config.gpu.yaml", "serve_config.gpu80.yaml"]
)
def test_shipped_configuration_is_cut_into_entries_without_loss(name: str) -> None:
    entries = config_text.shipped(name)
    text = (config_text.ROOT / name).read_text()
    assert text.endswith("".join(entry.text for entry in entries.values()))
    expected = shipped(name)["capabilities"]
    assert {n: list(e.models) for n, e in entries.items()} == {
        n: list(row["models"]) for n, row in expected.items()
    }
