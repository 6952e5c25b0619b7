"""The engine core's fork, on a node with GPUs."""

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from torch import float32

from deployments.engines.protocol import EngineLoadFailed
from deployments.engines.vllm import engine
from tests.support import nvml
from tests.support.engine_host import ROOT

# Each runs in a fork of one process that has imported vLLM, which takes a core ten seconds.
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

BOTH = """
import os, sys
from pathlib import Path
from deployments.engines.vllm.engine_core import core_process

for script in map(Path, sys.argv[1:]):
    if (pid := os.fork()) == 0:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(script.with_suffix("." + name), os.O_WRONLY | os.O_CREAT), number)
        exec(script.read_text())
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    script.with_suffix(".code").write_text(str(ended))
"""


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    """What came of each script on a node of two GPUs."""
    folder = tmp_path_factory.mktemp("cores")
    nvml.build(folder)
    fake = nvml.FakeNvml(folder / "nvml")
    env = {"LD_LIBRARY_PATH": str(folder), nvml.FOLDER: str(fake.folder), "PYTHONPATH": str(ROOT)}
    scripts = {"fork": FORK, "fails": FAILS}
    for name, text in scripts.items():
        (folder / f"{name}.py").write_text(text)
    command = [sys.executable, "-c", BOTH, *(str(folder / f"{name}.py") for name in scripts)]
    subprocess.run(command, env=os.environ | env, check=True)

    def read(name: str, suffix: str) -> str:
        return (folder / f"{name}.{suffix}").read_text()

    return {
        name: Done(int(read(name, "code")), read(name, "out"), read(name, "err"))
        for name in scripts
    }


def test_core_that_fails_writes_its_traceback_before_it_ends(done: dict[str, Done]) -> None:
    failed = done["fails"]
    assert (failed.code, failed.out.strip()) == (1, "AssertionError")
    assert failed.err.endswith("in fails\nAssertionError\n")


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
def test_core_can_ask_nvml_although_its_frontend_did(done: dict[str, Done]) -> None:
    assert done["fork"].code == 0, done["fork"].err[-2000:]
