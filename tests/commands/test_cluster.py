"""Commands that join the cluster: when Ray is imported, and what is said where there is none.
What they do to a running arbiter is in tests/graph/test_gpu_config.py."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_line import Run

WATCHED = """
import builtins, os, sys
from deployments.cli.main import main
plain = builtins.__import__
def watched(name, *args, **kwargs):
    if name.partition(".")[0] == "ray":
        print(os.environ.get("RAY_AUTH_MODE"), flush=True)
        os._exit(0)
    return plain(name, *args, **kwargs)
builtins.__import__ = watched
main(sys.argv[1:])
"""


@pytest.mark.parametrize("command", ["record", "upgrade", "down"])
@pytest.mark.parametrize("has_token", [True, False])
def test_ray_is_imported_once_it_was_told_whether_to_read_the_token_of_the_home_folder(
    command: str, has_token: bool, tmp_path: Path
) -> None:
    if has_token:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("secret")
    env = {**os.environ, "HOME": str(tmp_path)}
    env.pop("RAY_AUTH_MODE", None)
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, command],
        check=False, env=env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.strip() == ("token" if has_token else "None")


@pytest.mark.parametrize("command", ["record", "upgrade", "down"])
def test_where_there_is_no_cluster_the_command_says_so(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    import ray

    def refuses(address: str, **_: object) -> None:
        raise ConnectionError("connection refused")

    monkeypatch.setattr(ray, "init", refuses)
    failed = run(command)
    assert failed.exit_code == 1
    assert "no Ray cluster at 'auto': connection refused" in failed.stderr
    assert "--address" in failed.stderr and "~/.ray/auth_token" in failed.stderr


def test_where_nothing_listens_ray_is_not_left_to_try_for_minutes(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray is asked"))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    failed = run("down", "--address", address)
    assert failed.exit_code == 1
    assert f"no Ray cluster at '{address}': [Errno 111]" in failed.stderr
