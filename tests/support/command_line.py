"""The command in this process, and a front that answers it as a test says."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from deployments.cli import http
from deployments.cli.main import app
from deployments.front.access import keys
from tests.support.scripted_front import ScriptedFront

Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `arbiter WORDS` with the variables given and no other of ours."""
    for name in ("ARBITER_URL", "ARBITER_KEY", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def run(*words: str, **env: str) -> Result:
        return CliRunner().invoke(app, words, env=env, prog_name="arbiter")

    return run


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch, owner: str) -> ScriptedFront:
    made = ScriptedFront()
    monkeypatch.setattr(http, "transport", made.transport)
    return made


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The key of the first start, where the command looks for it."""
    path = tmp_path / "keys.json"
    keys.ensure_first(path)
    monkeypatch.setattr(keys, "keys_path", lambda: path)
    monkeypatch.delenv("ARBITER_KEY", raising=False)
    return keys.first_key_path(path).read_text().strip()
