"""The engine core's fork, on a node with GPUs."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import float32

from deployments.engines.protocol import EngineLoadFailed
from deployments.engines.vllm import engine
from tests.support import nvml
from tests.support.engine_host import ROOT

FORK = """
import os, pynvml
from deployments.engines.vllm.engine_core import core_process

def asks_nvml(*_):
    code = 1
    try:
        pynvml.nvmlInit()
        code = pynvml.nvmlDeviceGetCount() - 2
    finally:
        os._exit(code)

core_process._live = asks_nvml
pynvml.nvmlInit()  # as vLLM counts the GPUs of a model that is divided, and does not close it
core = core_process.fork_core(None, "/nowhere", stats=False)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(core.pid, 0)[1]))
"""


FAILS = """
import os
from deployments.engines.vllm.engine_core import core_process

def fails(*_):
    raise AssertionError  # as vLLM's kernels do, without a word

core_process._core = fails
core = core_process.fork_core(None, "/nowhere", stats=False)
try:
    core_process.await_core(core)
except core_process.EngineLoadFailed as error:
    print(error.kind)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(core.pid, 0)[1]))
"""


def test_core_that_fails_writes_its_traceback_before_it_ends() -> None:
    env = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", FAILS], env=os.environ | env, check=False, capture_output=True
    )
    assert (done.returncode, done.stdout.strip()) == (1, b"AssertionError")
    assert done.stderr.endswith(b"in fails\nAssertionError\n")


@pytest.mark.parametrize("on_cpu", [True, False])
def test_adapters_in_float32_are_refused_on_a_gpu_in_words(
    on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "on_cpu", lambda: on_cpu)
    config: Any = SimpleNamespace(lora_config=object(), model_config=SimpleNamespace(dtype=float32))
    refused = contextlib.nullcontext() if on_cpu else pytest.raises(EngineLoadFailed, match="dtype")
    with refused:
        engine._refuse_float32_adapters(config)


@pytest.mark.spec("D4")
def test_shared_host_copy_is_refused_on_a_gpu_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "on_cpu", lambda: False)
    with pytest.raises(EngineLoadFailed, match="give it `host_copy: private`"):
        engine.build({"model": "/m", "host_copy": {"own_bytes": 1}})


@pytest.mark.spec("B5")
def test_core_can_ask_nvml_although_its_frontend_did(tmp_path: Path) -> None:
    nvml.build(tmp_path)
    fake = nvml.FakeNvml(tmp_path / "nvml")
    env = {"LD_LIBRARY_PATH": str(tmp_path), nvml.FOLDER: str(fake.folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", FORK], env=os.environ | env, check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
