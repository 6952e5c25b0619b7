"""Copies of models' files in the hands of processes of the node agent's group."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from arbiter.node import copy_files, group_socket
from tests.support.host_copies import Copies
from tests.support.waits import WITHIN_S, wait_in_thread

pytestmark = pytest.mark.spec("D4", "L4")
WEIGHTS = b"weights" * 1_000
OTHER_UID = 65_534
# As a program of another user would: it opens the second file by path, as libraries do.
PROGRAM = """
import json, os, socket, sys
path, key, of_agent = sys.argv[1:]
try:
    os.open(of_agent, os.O_RDONLY)
except PermissionError:
    print("the agent's descriptors are closed to it")
with socket.socket(socket.AF_UNIX) as agent:
    agent.connect(path)
    agent.sendall(json.dumps({"key": key}).encode() + b"\\n")
    _, fds, _, _ = socket.recv_fds(agent, 1, 253)
    print(open(f"/proc/self/fd/{fds[1]}", "rb").read().decode())
"""


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    with tempfile.TemporaryDirectory(prefix="gc-") as folder:
        os.chmod(folder, 0o711)
        monkeypatch.setattr(group_socket, "FOLDERS", Path(folder))
        (own := Path(folder) / "agent").mkdir(mode=0o700)
        made = Copies(own)
        yield made
        made.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "a.safetensors").write_bytes(WEIGHTS)
    return tmp_path


def asked(path: str, key: object) -> tuple[socket.socket, list[int]]:
    """The open connection, and what was handed over it."""
    with contextlib.ExitStack() as unless_handed:
        agent = unless_handed.enter_context(socket.socket(socket.AF_UNIX))
        agent.settimeout(WITHIN_S)
        agent.connect(path)
        agent.sendall(json.dumps({"key": key}).encode() + b"\n")
        _, fds, _, _ = socket.recv_fds(agent, 1, 253)
        unless_handed.pop_all()
    return agent, fds


def test_copy_is_in_use_while_a_process_of_the_group_is_connected(
    copies: Copies, model: Path
) -> None:
    lent = copies.lend("t", model, for_group=True)
    [reading] = copies.readings()
    agent, (index, file) = asked(reading.socket, lent["key"])
    assert copy_files.read_index(index).names == ("a.safetensors",)
    assert os.pread(file, len(WEIGHTS) + 1, 0) == WEIGHTS and copy_files.is_sealed(file)
    copies.take_back("t")
    [reading] = copies.readings()
    assert reading.users == (f"process-{os.getpid()}-1",)
    assert copies.drop(lent["key"]) is False
    agent.close()
    wait_in_thread(lambda: not copies.readings())
    os.close(index)
    os.close(file)


def test_copy_of_a_model_that_shares_with_engines_alone_is_not_handed_to_the_group(
    copies: Copies, model: Path
) -> None:
    copies.lend("before", model)
    [reading] = copies.readings()
    assert reading.socket == "" and not list(group_socket.FOLDERS.glob("arbiter-group-*"))
    (other := model / "other").mkdir()
    (other / "a.safetensors").write_bytes(b"of the group")
    copies.lend("group", other, for_group=True)
    own = copies.lend("own", model)  # a model has one copy: each lent one ends that before it
    [path] = {r.socket for r in copies.readings()} - {""}
    assert [r.users for r in copies.readings() if not r.is_leaving] == [("own",)]
    for key in (own["key"], "0" * 32, 7, None):
        agent, fds = asked(path, key)
        assert fds == [], key
        agent.close()


def held_file() -> Path:
    """The first file of a copy in the descriptors of this process, which is the agent here."""
    own = Path(f"/proc/{os.getpid()}/fd")
    links = {fd: os.readlink(fd) for fd in own.iterdir() if fd.is_symlink()}
    return next(fd for fd, name in links.items() if re.search(r"memfd:host-shared.*\.0\b", name))


@pytest.mark.skipif(os.getuid() != 0, reason="starts processes as another user")
@pytest.mark.parametrize("groups", [[os.getgid()], []])
def test_another_user_reaches_the_files_by_the_socket_if_it_is_of_the_group(
    copies: Copies, model: Path, groups: list[int]
) -> None:
    lent = copies.lend("t", model, for_group=True)
    [reading] = copies.readings()
    program = [os.path.realpath(sys.executable), "-IS", "-c", PROGRAM, reading.socket, lent["key"]]
    done = subprocess.run(
        [*program, str(held_file())],
        user=OTHER_UID,
        group=OTHER_UID,
        extra_groups=groups,
        capture_output=True,
        text=True,
        cwd="/",
        check=False,
    )
    assert done.stdout.startswith("the agent's descriptors are closed to it"), done.stderr
    assert (WEIGHTS.decode() in done.stdout) == bool(groups)
    assert bool(groups) or "PermissionError" in done.stderr


def test_more_processes_than_the_bound_are_turned_away_until_another_has_left(
    copies: Copies, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_socket, "USERS_MOST", 1)
    key = copies.lend("t", model, for_group=True)["key"]
    [reading] = copies.readings()
    first, fds = asked(reading.socket, key)
    assert len(fds) == 2
    with contextlib.suppress(ConnectionError):
        second, none = asked(reading.socket, key)
        second.close()
        assert none == []
    first.close()
    wait_in_thread(lambda: copies.readings()[0].users == ("t",))
    last, again = asked(reading.socket, key)
    assert len(again) == 2
    last.close()
    for fd in (*fds, *again):
        os.close(fd)


def test_engines_are_lent_a_copy_where_a_stranger_has_the_folder_of_the_group(
    copies: Copies, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (group_socket.FOLDERS / f"arbiter-group-{os.getuid()}").symlink_to(tmp_path)
    assert copies.lend("t", model, for_group=True)
    assert copies.readings()[0].socket == ""
    assert "no process of the group is handed copies" in caplog.text
