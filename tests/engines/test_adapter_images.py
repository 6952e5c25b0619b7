"""Adapters that are cold, warm or hot give the same tokens, also to the next engine (F3)."""

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from arbiter.pool import SlabView, create
from arbiter.units import MIB, Bytes, Content
from tests.support.engine_host import Child, ZygoteUnderTest, is_gone, served, until

VLLM = "deployments.engines.vllm.engine:build"
SLOTS = 2
NAMES = tuple(f"a{i}" for i in range(6))
PROMPT = [(i * 37) % 2000 + 3 for i in range(40)]


@pytest.fixture
def slab() -> Iterator[int]:
    fd = create("test", Bytes(256 * MIB))
    with contextlib.closing(SlabView(fd)) as view:
        view.limit_bytes = Bytes(128 * MIB)
    yield fd
    os.close(fd)


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny.parent / f"{tiny.name}-adapters", tmp_path / "in")
    return tmp_path


def config(model: Path, folder: Path, slab: int | None, rank: int = 16) -> dict[str, Any]:
    adapters = {"folder": str(folder / "in"), "store": str(folder / "store"), "max_rank": rank}
    args = {"dtype": "float32", "kv_cache_memory_bytes": 64 * MIB, "max_model_len": 1024}
    given: dict[str, Any] = {
        "model": str(model),
        "served_name": "tiny",
        "adapters": {**adapters, "slots": SLOTS, "wait_s": 30.0},
        "engine_args": {**args, "max_num_seqs": 16, "enable_prefix_caching": False},
    }
    if slab is not None:
        given["slabs"] = {Content.ADAPTER.value: {"path": f"/proc/{os.getpid()}/fd/{slab}"}}
    return given


def tokens(child: Child, name: str) -> list[int]:
    body = {"model": name, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    status, got = child.call("POST", "/v1/completions", body)
    assert status == 200, got
    found: list[int] = got["choices"][0]["token_ids"]
    return found


def all_tokens(child: Child) -> dict[str, list[int]]:
    """One after the other: with two slots each adapter takes the slot of an earlier one."""
    return {name: tokens(child, name) for name in NAMES}


def facts(child: Child) -> dict[str, int]:
    found: dict[str, int] = child.call("GET", "/slab")[1]["adapter"]
    return found


def kill(child: Child) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    until(lambda: is_gone(child.pid), 10)


def test_same(engines: ZygoteUnderTest, tiny: Path, folder: Path, slab: int) -> None:
    with served(engines, "plain", VLLM, config(tiny, folder, None)) as child:
        right = all_tokens(child)
        assert len({tuple(found) for found in right.values()}) == len(NAMES)
    child = engines.spawn("images", VLLM, config(tiny, folder, slab)).hold()
    assert child.ready()[0] == 200
    cold = all_tokens(child)
    print(facts(child), child.call("GET", "/adapters")[1])
    warm = all_tokens(child)
    print(facts(child), child.call("GET", "/adapters")[1])
    print(child.log[-3000:])
    assert cold == right
    assert warm == right
    kill(child)
    with served(engines, "next", VLLM, config(tiny, folder, slab)) as child:
        pass
        assert all_tokens(child) == right
        print(facts(child), child.call("GET", "/adapters")[1])
