"""tools/install.py where a former try has left something; no index of packages can be asked."""

import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from deployments.progress import ProgramFailed
from tools.install import TORCH, install, install_cpu_torch


@pytest.fixture(autouse=True)
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")


@pytest.fixture
def broken_off(tmp_path: Path) -> Path:
    """An environment as Ctrl-C leaves it before it has pip."""
    venv.create(tmp_path / "venv", with_pip=False)
    return tmp_path / "venv"


def test_environment_that_was_broken_off_before_it_had_pip_is_made_whole(broken_off: Path) -> None:
    with pytest.raises(ProgramFailed, match="No matching distribution"):
        install(broken_off, "gpu", "")
    python = broken_off / "bin" / "python"
    assert subprocess.run([python, "-m", "pip", "--version"], check=True).returncode == 0


@pytest.mark.parametrize(
    ("version", "is_kept"), [(f"{TORCH.partition('==')[2]}+cpu", True), ("2.0.0+cpu", False)]
)
def test_torch_of_another_version_is_replaced(
    broken_off: Path, version: str, is_kept: bool
) -> None:
    home = sysconfig.get_path("purelib", vars={"base": str(broken_off)})
    Path(home, "torch.py").write_text(f"__version__ = {version!r}\n")
    notes: list[str] = []
    if is_kept:
        install_cpu_torch(broken_off / "bin" / "python", notes.append)
        assert notes == ["is there"]
    else:
        with pytest.raises(ProgramFailed):
            install_cpu_torch(broken_off / "bin" / "python", notes.append)
        assert "is there" not in notes
