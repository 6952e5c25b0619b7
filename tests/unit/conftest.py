"""What holds for all unit tests: none starts a Ray cluster; GPUs for tests of what reads them, see
tests.support.nvml."""

from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest
from ray._private import auto_init_hook

from tests.support import nvml


@pytest.fixture(scope="session", autouse=True)
def no_cluster() -> Iterator[None]:
    """Ray starts a cluster, or joins one of this machine, for a call that needs one; here such a
    call fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_init_hook, "enable_auto_connect", False)
        yield


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def fake(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[nvml.FakeNvml]:
    """What pynvml sees in this process while the test runs."""
    for name, value in nvml.opened(library).items():
        monkeypatch.setattr(pynvml, name, value)
    monkeypatch.setenv(nvml.FOLDER, str(tmp_path))
    yield nvml.FakeNvml(tmp_path)
