"""What the command line sends, and to whom."""

import io
import os
import subprocess
import sys
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path

import pytest

from deployments import cli
from deployments.front import arbiter_gateway, keys


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The key of the first start, where the command looks for it."""
    path = tmp_path / "keys.json"
    keys.ensure_first(path)
    monkeypatch.setattr(keys, "keys_path", lambda: path)
    monkeypatch.delenv("ARBITER_KEY", raising=False)
    return keys.first_key_path(path).read_text().strip()


@pytest.mark.spec("L1")
def test_the_owners_key_is_sent_to_this_machine_and_no_other(owner: str) -> None:
    for here in ("http://127.0.0.1:8000", "http://localhost:8000", "http://[::1]:8000"):
        assert cli.api_key(here) == owner
    for away in ("http://10.0.0.7:8000", "http://gpu-box:8000", "http://localhost.evil.example"):
        assert cli.api_key(away) == ""


@pytest.mark.spec("L1")
def test_key_from_the_environment_is_sent_to_any_host(
    owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARBITER_KEY", "arb-mine")
    assert cli.api_key("http://gpu-box:8000") == "arb-mine" != owner


@pytest.mark.spec("L3")
@pytest.mark.parametrize(
    ("text", "number"), [("17", 17), ("", 3), ("-1", 3), ("٣", 3), ("9" * 5000, 3), ("1e3", 3)]
)
def test_invalid_last_event_id_is_ignored(text: str, number: int) -> None:
    assert arbiter_gateway.event_number(text, 3) == number


def test_refusal_is_printed_with_its_message(
    owner: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = b'{"error": {"message": "bypass_count: at least 0", "code": "invalid_request"}}'

    def refuse(request: urllib.request.Request, timeout: float) -> None:
        raise urllib.error.HTTPError(request.full_url, 400, "no", Message(), io.BytesIO(said))

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    assert cli.main(["settings", "bypass_count=-1"]) == 1
    assert capsys.readouterr().err.endswith("/arbiter/settings: 400: bypass_count: at least 0\n")


@pytest.mark.parametrize("command", ["record", "upgrade", "down"])
def test_ray_is_imported_once_it_was_told_to_read_the_token_of_the_home_folder(
    command: str, tmp_path: Path
) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    say = f"""
import builtins, os
from deployments import cli
plain = builtins.__import__
def watched(name, *args, **kwargs):
    if name.partition(".")[0] == "ray":
        raise SystemExit(os.environ.get("RAY_AUTH_MODE"))
    return plain(name, *args, **kwargs)
builtins.__import__ = watched
cli.main([{command!r}])
"""
    env = {**os.environ, "HOME": str(tmp_path)}
    env.pop("RAY_AUTH_MODE", None)
    done = subprocess.run(
        [sys.executable, "-c", say],
        check=False,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr.strip() == "token"
