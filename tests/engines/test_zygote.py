"""The zygote and its children, with an engine that is light: what the node agent relies on."""

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from arbiter.protocol.accepting import SHORT_PAUSE_S
from deployments.engines import zygote as module
from deployments.engines.linux import allowed_environment
from tests.support import nvml
from tests.support.engine_host import (
    ROOT,
    Child,
    ZygoteUnderTest,
    device_bytes,
    host_bytes,
    is_gone,
    until,
    zygote,
)
from tests.support.open_files import open_files

FAKE = "tests.support.fake_engine:FakeEngine"
MIB = 1 << 20
SECRETS = {"HF_TOKEN": "hf_secret", "AWS_SECRET_ACCESS_KEY": "x", "MY_PASSWORD": "x"}


@pytest.fixture(scope="module")
def light() -> Iterator[ZygoteUnderTest]:
    with zygote("numpy", SECRETS) as running:
        yield running


def fake(light: ZygoteUnderTest, ticket: str, **args: Any) -> Child:
    return light.spawn(ticket, FAKE, {"served_name": ticket, "engine_args": args})


@pytest.mark.spec("L4")
def test_the_zygote_is_single_threaded_so_that_its_forks_are_sound(light: ZygoteUnderTest) -> None:
    reply = light.ask({"op": "ping"})
    assert reply == {"ready": True, "pid": light.process.pid, "threads": 1}


@pytest.mark.spec("L4")
def test_zygote_with_a_librarys_thread_names_it_and_forks_nothing() -> None:
    with zygote("tests.support.threaded_library") as threaded:
        fields = {"ticket": "t", "entry": FAKE, "config": {}, "env": {}}
        socket_path = str(threaded.folder / "t.sock")
        reply = threaded.ask({"op": "spawn", "socket": socket_path, **fields})
    assert "threads beside its own (library_thread)" in reply["error"]


@pytest.fixture
def driver(tmp_path: Path) -> dict[str, str]:
    """The environment of a zygote on a node with GPUs."""
    nvml.build(tmp_path)
    fake = nvml.FakeNvml(tmp_path / "nvml")
    return {"LD_LIBRARY_PATH": str(tmp_path), "ARBITER_FAKE_NVML": str(fake.folder)}


@pytest.mark.spec("B1")
def test_engine_can_ask_nvml_although_a_library_of_the_zygote_did(driver: dict[str, str]) -> None:
    with zygote("tests.support.nvml_at_import", driver) as running:
        child = running.spawn("t", "tests.support.nvml_at_import:build", {}).hold()
        assert child.ready()[0] == 200, child.log


CUDA = "int cuDeviceGetCount(int *count) { *count = 1; return %d; }"


@pytest.mark.spec("B1")
@pytest.mark.parametrize(("code", "forks"), [(3, True), (0, False)])
def test_zygote_with_a_thread_of_the_driver_forks_unless_cuda_is_initialised(
    tmp_path: Path, code: int, forks: bool
) -> None:
    (tmp_path / "cuda.c").write_text(CUDA % code)
    command = ["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", tmp_path / "cuda.c"]
    subprocess.run(command, check=True)
    env = {"LD_LIBRARY_PATH": str(tmp_path), "ARBITER_LOADS": "libcuda.so.1"}
    with zygote("tests.support.threaded_library", env | {"ARBITER_THREAD": "cuda00001800007"}) as z:
        socket_path = str(z.folder / "t.sock")
        fields = {"ticket": "t", "entry": FAKE, "config": {}, "env": {}, "socket": socket_path}
        reply = z.ask({"op": "spawn", **fields})
        z.spawned += [reply["pid"]] if "pid" in reply else []
    assert ("pid" in reply) is forks, reply


@pytest.mark.spec("L4")
def test_only_the_owner_can_reach_a_socket(light: ZygoteUnderTest) -> None:
    child = fake(light, "modes")
    for path in (light.socket, Path(child.path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.spec("L4")
def test_a_socket_in_a_directory_others_can_enter_is_refused(
    light: ZygoteUnderTest, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    path = str(tmp_path / "x.sock")
    reply = light.ask({"op": "spawn", "ticket": "open", "entry": FAKE, "socket": path})
    assert "0700" in reply["error"]


@pytest.mark.spec("L4")
def test_connection_of_another_user_is_closed(
    light: ZygoteUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    server = module.Zygote(tmp_path / "z.sock")
    monkeypatch.setattr(module, "peer_uid", lambda conn: os.getuid() + 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(str(tmp_path / "z.sock"))
        server._accept()
        assert stranger.recv(1) == b""
    assert not server.buffers


@pytest.mark.spec("L4")
def test_zygote_goes_on_after_connections_that_it_could_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o700)
    server, accept = module.Zygote(tmp_path / "z.sock"), socket.socket.accept
    fails, paused = [errno.ECONNABORTED, errno.EMFILE, errno.ENFILE], list[float]()

    def short(listener: socket.socket) -> tuple[socket.socket, Any]:
        if fails:
            number = fails.pop(0)
            raise OSError(number, os.strerror(number))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", short)
    monkeypatch.setattr(time, "sleep", paused.append)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
        agent.connect(str(tmp_path / "z.sock"))
        for _ in range(4):
            server._accept()
    assert len(server.buffers) == 1 and paused == [SHORT_PAUSE_S] * 2
    assert "Too many open files" in capsys.readouterr().err
    server.server.close()
    with pytest.raises(OSError, match="Bad file"):
        server._accept()


def test_peer_uid_comes_from_the_kernel() -> None:
    here, there = socket.socketpair()
    assert module.peer_uid(here) == os.getuid()
    here.close()
    there.close()


@pytest.mark.spec("L4")
def test_no_secret_reaches_the_zygote_or_a_child(light: ZygoteUnderTest) -> None:
    child = fake(light, "clean")
    for pid in (light.process.pid, child.pid):
        environment = Path(f"/proc/{pid}/environ").read_text()
        assert "PATH=" in environment
        assert not [name for name in SECRETS if f"{name}=" in environment]


def test_the_allow_list_knows_settings_from_secrets() -> None:
    given = {"HF_HOME": "/m", "HF_TOKEN": "s", "VLLM_API_KEY": "s", "OMP_NUM_THREADS": "2"}
    kept = allowed_environment({**given, "RAY_ADDRESS": "x", "LD_PRELOAD": "x"})
    assert kept.keys() & {*given, "RAY_ADDRESS", "LD_PRELOAD"} == {"HF_HOME", "OMP_NUM_THREADS"}
    assert kept["OMP_NUM_THREADS"] == "2"


@pytest.mark.spec("L4")
def test_a_variable_off_the_allow_list_is_refused_by_name(light: ZygoteUnderTest) -> None:
    path = str(light.folder / "env.sock")
    message = {"op": "spawn", "ticket": "env", "entry": FAKE, "socket": path}
    reply = light.ask({**message, "env": {"LD_PRELOAD": "/tmp/x.so"}})
    assert "LD_PRELOAD" in reply["error"]


@pytest.mark.spec("L4")
def test_two_children_draw_different_random_numbers(light: ZygoteUnderTest) -> None:
    first, second = (
        light.spawn(t, "tests.support.odd_engines:RandomEngine", {}) for t in ("d1", "d2")
    )
    assert first.ready()[0] == second.ready()[0] == 200
    drawn, other = (c.call("GET", "/v1/dice")[1] for c in (first, second))
    assert drawn[0] != other[0] and drawn[1] != other[1]


@pytest.mark.spec("L4")
def test_a_child_leads_its_session_and_can_gain_no_privilege(light: ZygoteUnderTest) -> None:
    child = fake(light, "status")
    assert child.ready()[0] == 200
    assert os.getsid(child.pid) == child.pid
    assert "NoNewPrivs:\t1" in Path(f"/proc/{child.pid}/status").read_text()


def test_a_child_holds_no_descriptor_of_the_zygote(light: ZygoteUnderTest) -> None:
    child = fake(light, "fds")
    assert child.ready()[0] == 200
    inodes = {
        link.split("[")[1].rstrip("]")
        for link in open_files(light.process.pid).values()
        if link.startswith("socket:")
    }
    held = open_files(child.pid).values()
    assert not [link for link in held if link.startswith("socket:[") and link[8:-1] in inodes]
    assert not [link for link in held if link.endswith(".lock")]


def test_spawning_a_ticket_twice_is_one_child(light: ZygoteUnderTest) -> None:
    first, second = fake(light, "twice"), fake(light, "twice")
    assert first.pid == second.pid
    rows = light.ask({"op": "list"})["children"]
    row = {"ticket": "twice", "pid": first.pid, "socket": first.path}
    assert [r for r in rows if r["ticket"] == "twice"] == [row]


def test_a_dead_child_leaves_the_list_and_its_ticket_may_live_again(
    light: ZygoteUnderTest,
) -> None:
    first = fake(light, "again")
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: not _listed(light, "again"), 60)
    assert fake(light, "again").pid != first.pid


def _listed(light: ZygoteUnderTest, ticket: str) -> bool:
    return any(row["ticket"] == ticket for row in light.ask({"op": "list"})["children"])


@pytest.mark.spec("A19")
def test_a_child_ends_with_its_holders_connection(light: ZygoteUnderTest) -> None:
    child = fake(light, "held", bytes=50 * MIB).hold()
    assert child.ready()[0] == 200
    child.let_go()
    until(lambda: is_gone(child.pid), 60)


@pytest.mark.spec("A10")
def test_fake_engine_that_stays_ends_neither_with_its_lifeline_nor_on_sigterm(
    light: ZygoteUnderTest,
) -> None:
    """What tests/faults/test_bad_engines.py has the node agent kill does resist."""
    child = fake(light, "stays", stays=True).hold()
    assert child.ready()[0] == 200
    child.let_go()
    os.kill(child.pid, signal.SIGTERM)
    until(lambda: {"lifeline: stays", "SIGTERM: stays"} <= set(child.log.splitlines()), 60)
    assert child.call("GET", "/control/health")[0] == 200
    os.killpg(child.pid, signal.SIGKILL)
    until(lambda: is_gone(child.pid), 60)


def test_a_lifeline_works_while_the_load_hangs(light: ZygoteUnderTest) -> None:
    child = fake(light, "hangs", fail="hang").hold()
    assert child.call("POST", "/v1/chat/completions", {})[0] == 503
    child.let_go()
    until(lambda: is_gone(child.pid), 60)


@pytest.mark.spec("A12")
@pytest.mark.parametrize(("fail", "memory"), [("memory", True), ("error", False)])
def test_a_failed_load_tells_its_cause_and_ends(
    light: ZygoteUnderTest, fail: str, memory: bool
) -> None:
    child = fake(light, f"fails-{fail}", fail=fail)
    status, body = child.ready()
    assert status == 500
    assert body["error"]["out_of_memory"] is memory
    assert "told to fail" in body["error"]["message"]
    until(lambda: is_gone(child.pid), 60)
    assert "told to fail" in child.log


@pytest.mark.parametrize(
    ("entry", "kind"),
    [
        ("tests.support.odd_engines:broken", "ValueError"),
        ("tests.support.odd_engines:missing", "AttributeError"),
        ("no_such_package.engine:build", "ModuleNotFoundError"),
    ],
)
def test_an_entry_that_cannot_be_built_is_a_failed_load(
    light: ZygoteUnderTest, entry: str, kind: str
) -> None:
    child = light.spawn(f"entry-{kind}", entry, {})
    status, body = child.ready()
    assert (status, body["error"]["type"]) == (500, kind)


@pytest.mark.spec("D1")
def test_bytes_of_an_asleep_child_are_host_bytes_to_the_kernel(light: ZygoteUnderTest) -> None:
    child = fake(light, "sleeps", bytes=200 * MIB)
    assert child.ready()[0] == 200
    awake = device_bytes(child.pid)
    assert awake >= 200 * MIB
    assert child.call("POST", "/control/sleep")[0] == 200
    assert awake - device_bytes(child.pid) >= 0.9 * awake
    assert host_bytes(child.pid) == 200 * MIB
    assert child.call("POST", "/v1/chat/completions", {})[0] == 503
    assert child.call("POST", "/control/wake")[1]["verified"] is True
    assert host_bytes(child.pid) == 0
    assert child.call("POST", "/v1/chat/completions", {})[0] == 200


@pytest.mark.spec("D6")
def test_a_wake_that_does_not_verify_loads_again_and_says_so(light: ZygoteUnderTest) -> None:
    child = fake(light, "forgets", bytes=MIB, forget=True)
    assert child.ready()[0] == 200
    assert child.call("POST", "/control/sleep")[0] == 200
    assert child.call("POST", "/control/wake")[1]["verified"] is False
    assert child.call("POST", "/v1/chat/completions", {})[0] == 200


def test_sleep_and_wake_may_be_repeated(light: ZygoteUnderTest) -> None:
    child = fake(light, "repeats", bytes=MIB)
    assert child.ready()[0] == 200
    for act in ("wake", "sleep", "sleep", "wake", "wake"):
        assert child.call("POST", f"/control/{act}")[0] == 200


def test_an_engine_that_cannot_sleep_says_so_and_goes_on(light: ZygoteUnderTest) -> None:
    child = light.spawn("upright", "tests.support.odd_engines:RandomEngine", {})
    assert child.ready()[1]["can_sleep"] is False
    assert child.call("POST", "/control/sleep")[0] == 409
    assert child.call("GET", "/control/health")[0] == 200


def test_a_sick_engine_is_not_healthy(light: ZygoteUnderTest) -> None:
    child = fake(light, "sick", sick=True)
    assert child.ready()[0] == 200
    status, body = child.call("GET", "/control/health")
    assert status == 503 and "told to be sick" in body["error"]["message"]


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ({"op": "spawn"}, "ticket"),
        ({"op": "spawn", "ticket": "../x", "entry": FAKE, "socket": "/x"}, "plain name"),
        ({"op": "spawn", "ticket": "t", "entry": "os", "socket": "/x"}, "module:function"),
        ({"op": "spawn", "ticket": "t", "entry": FAKE, "socket": "/" + "x" * 200}, "at most"),
        ({"op": "dance"}, "dance"),
        ([], "TypeError"),
    ],
)
def test_a_bad_message_is_answered_with_what_is_wrong(
    light: ZygoteUnderTest, message: Any, word: str
) -> None:
    assert word in light.ask(message)["error"]


def test_two_zygotes_cannot_share_a_path(light: ZygoteUnderTest) -> None:
    command = [sys.executable, "-m", "deployments.engines.zygote", "--socket", str(light.socket)]
    second = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=30, check=False)
    assert second.returncode != 0
    assert b"another zygote" in second.stderr
    assert light.ask({"op": "ping"})["ready"]


@pytest.mark.spec("A19")
def test_children_outlive_a_killed_zygote() -> None:
    with zygote() as first:
        child = fake(first, "orphan").hold()
        assert child.ready()[0] == 200
        first.process.kill()
        first.process.wait()
        assert child.call("POST", "/v1/chat/completions", {})[0] == 200


@pytest.mark.spec("A19")
def test_zygote_without_its_socket_file_ends_with_its_children() -> None:
    with zygote(linger_s=0.2) as lost:
        child = fake(lost, "lost").hold()
        assert child.ready()[0] == 200
        lost.socket.unlink()
        lost.hang_up()
        assert lost.process.wait(60) == 0
        until(lambda: is_gone(child.pid), 60)


def test_zygote_without_children_and_agent_ends() -> None:
    with zygote(linger_s=0.2) as idle:
        idle.hang_up()
        assert idle.process.wait(60) == 0
        assert not idle.socket.exists()
