"""Stands in for libraries that ask NVML at their import whether there is a GPU, and close it as
torch does: never. An engine of it asks again in its own process.
"""

import os

import pynvml

from deployments.engines.protocol import Config
from tests.support import nvml
from tests.support.fake_engine import FakeEngine

os.environ[nvml.FOLDER] = os.environ["ARBITER_FAKE_NVML"]
for _ in range(3):
    pynvml.nvmlInit()


def build(config: Config) -> FakeEngine:
    pynvml.nvmlInit()
    pynvml.nvmlDeviceGetHandleByIndex(0)
    return FakeEngine(config)
