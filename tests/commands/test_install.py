"""tools/install.py where a former try has left something; no index of packages can be asked."""

import hashlib
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from deployments.progress import ProgramFailed
from tools.install import (
    OPTIONAL,
    TORCH,
    configured_sources,
    drop_broken,
    install,
    install_cpu_torch,
    pip,
)

WHEEL = {
    "METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
    "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "RECORD": "tiny.py,,\n",
}


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


def test_what_is_there_and_does_not_import_is_removed(
    broken_off: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = sysconfig.get_path("purelib", vars={"base": str(broken_off)})
    fails, imports, _absent = OPTIONAL
    Path(home, f"{fails}.py").write_text("raise RuntimeError('built for another torch')")
    Path(home, f"{imports}.py").write_text("")
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr("tools.install.pip", lambda _python, _note, *words: asked.append(words))
    drop_broken(broken_off / "bin" / "python", print)
    assert asked == [("uninstall", "-y", fails)]
    Path(home, f"{fails}.py").write_text("")
    drop_broken(broken_off / "bin" / "python", print)
    assert len(asked) == 1


def test_uv_is_told_what_pip_is_configured_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uv reads none of pip's files. Of two settings pip takes that of its command, and the
    environment's before both."""
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = https://global/simple\ncert = /global.pem\n"
        "extra-index-url = https://a/simple\n    https://b/simple\ntimeout = 3\n"
        "[install]\nindex-url = https://name:secret@install/simple\nconstraint = /c.txt\n"
        "[download]\nindex-url = https://download/simple\n"
    )
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_FIND_LINKS", "/x /y")
    monkeypatch.setenv("PIP_CERT", "/environment.pem")
    assert {k: v for k, v in configured_sources(Path(sys.executable)).items() if v} == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_DEFAULT_INDEX": "https://name:secret@install/simple",
        "UV_INDEX": "https://a/simple https://b/simple",
        "UV_CONSTRAINT": "/c.txt",
        "UV_FIND_LINKS": "/x,/y",
        "SSL_CERT_FILE": "/environment.pem",
    }


def test_uv_installs_from_the_sources_of_pip_what_has_the_hash_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A constraint of pip's own, which has no hash, does not stand in the way."""
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    (folder / "bin" / "uv").symlink_to(Path(sys.executable).with_name("uv"))
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.py", "")
        for name, text in WHEEL.items():
            archive.writestr(f"tiny-1.0.dist-info/{name}", text)
    constraint, wanted = tmp_path / "constraint.txt", tmp_path / "wanted.txt"
    constraint.write_text("torch<=3\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(constraint))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    words = "--require-hashes", "--no-deps", "-r", str(wanted)
    wanted.write_text(f"tiny==1.0 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(ProgramFailed, match="Hash mismatch"):
        pip(python, print, "install", *words)
    wanted.write_text(f"tiny==1.0 --hash=sha256:{digest}\n")
    pip(python, print, "install", *words)
    assert subprocess.run([python, "-c", "import tiny"], check=True).returncode == 0
