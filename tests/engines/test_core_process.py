"""The engine core's fork, on a node with GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import nvml
from tests.support.engine_host import ROOT

FORK = """
import os, pynvml
from deployments.engines.vllm import core_process

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


@pytest.mark.spec("B5")
def test_core_can_ask_nvml_although_its_frontend_did(tmp_path: Path) -> None:
    nvml.build(tmp_path)
    fake = nvml.FakeNvml(tmp_path / "nvml")
    env = {"LD_LIBRARY_PATH": str(tmp_path), nvml.FOLDER: str(fake.folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", FORK], env=os.environ | env, check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
