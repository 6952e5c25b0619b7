"""A zygote and its children under a test: start, speak, and leave nothing behind."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arbiter.node import procfs
from arbiter.node.cleanup import sweep
from arbiter.node.zygote_client import private_folder
from tests.support.open_files import open_files
from tests.support.waits import WITHIN_S, pauses

ROOT = Path(__file__).parents[2]

LOAD_S = 300.0  # of several processes, on a busy machine


class Connection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str, timeout_s: float = 60.0) -> None:
        super().__init__("engine", timeout=timeout_s)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


@dataclass
class Child:
    """One spawned engine, and the connection that keeps it alive."""

    pid: int
    path: str
    lifeline: Connection | None = None

    def hold(self) -> "Child":
        self.lifeline = Connection(self.path, LOAD_S)  # where nothing is preloaded it imports first
        self.lifeline.request("GET", "/control/lifeline")
        self.lifeline.getresponse()
        return self

    def let_go(self) -> None:
        assert self.lifeline is not None
        self.lifeline.sock.shutdown(socket.SHUT_RDWR)
        self.lifeline.close()

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: dict[str, str] | None = None,
        within_s: float = 60.0,
    ) -> tuple[int, Any]:
        conn = Connection(self.path, within_s)
        data = None if body is None else json.dumps(body)
        conn.request(method, path, data, {"content-type": "application/json"} | (headers or {}))
        answer = conn.getresponse()
        raw = answer.read()
        conn.close()
        is_json = answer.getheader("content-type", "").startswith("application/json")
        return answer.status, json.loads(raw) if is_json else raw

    def ready(self) -> tuple[int, Any]:
        return self.call("GET", "/control/ready", within_s=LOAD_S)

    @property
    def log(self) -> str:
        return Path(self.path).with_suffix(".log").read_text()


class ZygoteUnderTest:
    """A zygote process with its own private folder."""

    def __init__(self, preload: str, env: dict[str, str], linger_s: float) -> None:
        beside = private_folder(Path(f"/tmp/zyg-{os.getuid()}"))
        self.folder = Path(tempfile.mkdtemp(dir=beside))  # mkdtemp makes it 0700
        sweep(self.folder)  # a run that was killed has left its own
        self.socket = self.folder / "zygote.sock"
        command = [sys.executable, "-m", "deployments.engines.zygote"]
        command += ["--socket", str(self.socket), "--preload", preload]
        command += ["--linger-s", str(linger_s)]
        self.process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **env})
        until(self.socket.exists, WITHIN_S)
        self.wire = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.wire.connect(str(self.socket))
        self.lines = self.wire.makefile("rb")
        self.spawned: list[int] = []

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        self.wire.sendall(json.dumps(message).encode() + b"\n")
        reply: dict[str, Any] = json.loads(self.lines.readline())
        return reply

    def spawn(self, ticket: str, entry: str, config: dict[str, Any], **env: str) -> Child:
        path = str(self.folder / f"{ticket}.sock")
        fields = {"ticket": ticket, "entry": entry, "config": config, "env": env, "socket": path}
        reply = self.ask({"op": "spawn", **fields})
        assert "pid" in reply, reply
        self.spawned.append(reply["pid"])
        return Child(reply["pid"], path)

    def hang_up(self) -> None:
        self.lines.close()
        self.wire.close()

    def close(self) -> None:
        for pid in self.spawned:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def zygote(
    preload: str = "", env: dict[str, str] | None = None, linger_s: float = 30.0
) -> Iterator[ZygoteUnderTest]:
    running = ZygoteUnderTest(preload, env or {}, linger_s)
    try:
        yield running
    finally:
        running.close()


@contextlib.contextmanager
def served(
    zygote: ZygoteUnderTest, ticket: str, entry: str, config: dict[str, Any]
) -> Iterator[Child]:
    """An engine that has loaded. At the end its holder lets go, and its process ends."""
    child = zygote.spawn(ticket, entry, config).hold()
    status, said = child.ready()
    assert status == 200, (said, child.log[-2000:])
    try:
        yield child
    finally:
        child.let_go()
        until(lambda: is_gone(child.pid), WITHIN_S)


@contextlib.contextmanager
def killed(
    zygote: ZygoteUnderTest, ticket: str, entry: str, config: dict[str, Any]
) -> Iterator[Child]:
    """An engine that has loaded. At the end it is killed with all that it started."""
    child = zygote.spawn(ticket, entry, config).hold()
    try:
        status, said = child.ready()
        assert status == 200, (said, child.log[-2000:])
        yield child
    finally:
        kill(child)


def kill(child: Child) -> None:
    """Returns once the process is gone; it may have been before."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    until(lambda: is_gone(child.pid), WITHIN_S)


def until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait on a condition, with a bound."""
    deadline, pause_s = time.monotonic() + seconds, pauses(0.01, 0.1)
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        os.sched_yield()
        with contextlib.suppress(InterruptedError):
            signal.sigtimedwait([], next(pause_s))


def waits_for_a_lock(pid: int) -> bool:
    """The kernel lists who waits behind whom: `1: -> FLOCK ADVISORY WRITE <pid> ...`."""
    rows = (row.split() for row in Path("/proc/locks").read_text().splitlines())
    return any(row[1] == "->" and row[2] == "FLOCK" and int(row[5]) == pid for row in rows)


def is_gone(pid: int) -> bool:
    """Reaped, or a zombie whose other threads have ended too: no bytes either way, and the zygote
    can reap it before it forks the next."""
    process = procfs.process(pid)
    return process is None or not process.alive


def tree(pid: int) -> list[int]:
    """A process and all that descend from it."""
    pids = [pid]
    for one in pids:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            pids += [int(p) for p in task.read_text().split()]
    return pids


def device_bytes(pid: int) -> int:
    """Private bytes of a process tree as the kernel counts them, shared memory aside, plus the
    memfds it holds that are neither host copies nor slabs of the pool."""
    elsewhere = ("host-copy", "host-pool")
    own = _memfds(pid, lambda name: not any(word in name for word in elsewhere))
    return sum(_private(p) for p in tree(pid)) + own


def disk_reads(pid: int) -> tuple[int, int]:
    """Bytes fetched from storage, and bytes asked for by read calls, by a process tree."""
    counters = [Path(f"/proc/{p}/io").read_text().split() for p in tree(pid)]
    return sum(int(f[f.index("read_bytes:") + 1]) for f in counters), sum(
        int(f[1]) for f in counters
    )


@contextlib.contextmanager
def reads_no_weights(pid: int, model: Path) -> Iterator[None]:
    """Within it the process tree fetches less from storage, and asks read calls for less, than a
    tenth of the model's weights; the rest is code."""
    weights = forget_weights(model)
    before = disk_reads(pid)
    yield
    disk, called = (now - then for now, then in zip(disk_reads(pid), before, strict=True))
    assert max(disk, called) < weights / 10, f"{disk} of storage, {called} by calls, of {weights}"


def forget_weights(model: Path) -> int:
    """Has the kernel keep no page of a model's weights that no process has mapped, so that to map
    them again fetches them from storage. Returns how many bytes they are."""
    weights = 0
    for file in model.rglob("*.safetensors"):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())  # pages that are not written yet would stay
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            weights += os.fstat(stream.fileno()).st_size
    return weights


def host_bytes(pid: int) -> int:
    return _memfds(pid, lambda name: "host-copy" in name)


def shared_copy_bytes(pid: int) -> int:
    """Of the copies of models' files, shared among engines, that a process tree has open."""
    return _memfds(pid, lambda name: "host-shared" in name)


def slab_bytes(pid: int) -> int:
    """Of the slabs that a process tree has open."""
    return _memfds(pid, lambda name: "host-pool" in name)


def _private(pid: int) -> int:
    sizes_bytes = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        key, value, *_ = line.split()
        sizes_bytes[key.rstrip(":")] = int(value) * 1024
    return sizes_bytes["Private_Clean"] + sizes_bytes["Private_Dirty"] - sizes_bytes["Pss_Shmem"]


def _memfds(pid: int, wanted: Callable[[str], bool]) -> int:
    seen = {}
    for one in tree(pid):
        for fd, name in open_files(one).items():
            if name.startswith("/memfd:") and wanted(name):
                with contextlib.suppress(FileNotFoundError):
                    stat = os.stat(fd)
                    seen[stat.st_ino] = stat.st_blocks * 512
    return sum(seen.values())
