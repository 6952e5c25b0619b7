"""A process with the heavy imports done that forks engine processes on request.

    python -m deployments.engines.zygote --socket PATH --preload module,module

Started by exec from the node agent. It stays single threaded and runs no tensor operation, so its
forks are sound and share its pages: an engine starts in a fraction of the time its imports take.
One JSON object per line each way over a unix socket in a 0700 directory, same user only:

    {"op": "ping"}                                -> {"ready": true, "pid": P, "threads": 1}
    {"op": "spawn", "ticket": T, "entry": "module:function", "config": {..}, "env": {..},
     "socket": PATH}                              -> {"pid": P}; the same ticket again: the same P
    {"op": "list"}                                -> {"children": [{"ticket", "pid", "socket"}]}
    anything wrong                                -> {"error": "why"}

A message sent while the imports still run is answered when they are done. Children outlive a
killed zygote; a child's output goes beside its socket, as `.log`.
"""

import argparse
import fcntl
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from arbiter.protocol.accepting import SHORT_PAUSE_S, is_shortage
from arbiter.protocol.peer_credentials import peer_uid
from deployments.engines import linux, nvidia
from deployments.engines.protocol import MAX_LINE_BYTES, BadSpawn, Spawn, parse_spawn

# After this long without a connection, a zygote checks whether an agent can still find it. An agent
# restarts in 1-2 s, so this is far beyond any restart.
LINGER_S = 30.0
TICK_S = 1.0  # between two such checks
SEND_S = 1.0  # a reply is a few hundred bytes; a reader slower than this is gone
_MARK = "ARBITER_ZYGOTE"  # set once the environment is the allowed one


class Zygote:
    """Answers the node agent and forks engines, in a loop of one thread. It runs no tensor
    operation and opens no device, so that its forks are sound."""

    def __init__(self, path: Path, linger_s: float = LINGER_S) -> None:
        self.path, self.linger_s = path, linger_s
        self.children: dict[str, tuple[int, Spawn]] = {}
        self.buffers: dict[socket.socket, bytes] = {}
        self.seen_s = 0.0
        self.poll = selectors.DefaultSelector()
        self.server = _listen(path)
        self.inode = path.stat().st_ino
        self.poll.register(self.server, selectors.EVENT_READ)
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.poll.register(self.wake_read, selectors.EVENT_READ)

    def run(self) -> None:
        self.seen_s = time.monotonic()  # not before: during the imports it could accept no agent
        # Without a handler Python would not write to the wakeup pipe when a child ends.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        while not self._is_lost():
            for key, _ in self.poll.select(TICK_S):
                self._ready(key.fileobj)
            self._reap()
        self._kill_all()
        self.path.unlink(missing_ok=True)

    def _ready(self, source: Any) -> None:
        if source is self.server:
            self._accept()
        elif source == self.wake_read:
            os.read(self.wake_read, 4096)
        else:
            self._read(source)

    def _accept(self) -> None:
        """Raises OSError where the socket itself is at fault."""
        try:
            conn, _ = self.server.accept()
        except ConnectionAbortedError:
            return  # the peer has closed the connection again
        except OSError as error:
            if not is_shortage(error):
                raise
            print(f"connections to {self.path} wait: {error}; raise ulimit -n", file=sys.stderr)
            time.sleep(SHORT_PAUSE_S)  # the connection still waits, so `select` returns at once
            return
        if peer_uid(conn) != os.getuid():
            conn.close()
            return
        conn.settimeout(SEND_S)
        self.buffers[conn] = b""
        self.poll.register(conn, selectors.EVENT_READ)

    def _read(self, conn: socket.socket) -> None:
        try:
            data = conn.recv(1 << 16)
        except OSError:
            data = b""
        *lines, rest = (self.buffers[conn] + data).split(b"\n")
        self.buffers[conn] = rest
        if not data or len(rest) > MAX_LINE_BYTES:
            return self._hang_up(conn)
        for line in lines:
            reply = json.dumps(self._answer(line)).encode() + b"\n"
            try:
                conn.sendall(reply)
            except OSError:
                return self._hang_up(conn)

    def _hang_up(self, conn: socket.socket) -> None:
        self.seen_s = time.monotonic()
        self.poll.unregister(conn)
        del self.buffers[conn]
        conn.close()

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            message = json.loads(line)
            op = message["op"]
            if op == "spawn":
                return {"pid": self._spawn(parse_spawn(message))}
        except (ValueError, KeyError, TypeError, OSError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        if op == "list":
            return {"children": [self._row(pid, spawn) for pid, spawn in self.children.values()]}
        if op == "ping":
            return {"ready": True, "pid": os.getpid(), "threads": len(linux.threads())}
        return {"error": f"no op {op!r}; there is: ping, spawn, list"}

    def _row(self, pid: int, spawn: Spawn) -> dict[str, Any]:
        return {"ticket": spawn.ticket, "pid": pid, "socket": str(spawn.socket)}

    def _spawn(self, spawn: Spawn) -> int:
        self._reap()
        if child := self.children.get(spawn.ticket):
            return child[0]
        linux.refuse_environment(spawn.env)
        linux.require_private(spawn.socket.parent)
        if others := [name for name in linux.threads()[1:] if not nvidia.may_stay(name)]:
            raise BadSpawn(
                f"the zygote has threads beside its own ({', '.join(others[:5])}), so that no fork"
                " would be sound. A library that it imported has started them; some are imported"
                " only where another package has brought them. Uninstall that package, or keep it"
                " from starting threads, and restart the zygote"
            )
        listener = bind(spawn.socket)
        pid = os.fork()
        if pid == 0:
            from deployments.engines import host  # `main` has imported it, at the right moment

            signal.set_wakeup_fd(-1)
            host.run(spawn, listener)
        listener.close()
        self.children[spawn.ticket] = (pid, spawn)
        return pid

    def _reap(self) -> None:
        for ticket, (pid, spawn) in list(self.children.items()):
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                del self.children[ticket]
                spawn.socket.unlink(missing_ok=True)

    def _is_lost(self) -> bool:
        """Whether this zygote is to end: no agent was connected for `linger_s`, and either none can
        connect any more, because the socket's path is gone or another zygote's, or it has no
        children."""
        if self.buffers or time.monotonic() - self.seen_s < self.linger_s:
            return False
        try:
            can_be_found = self.path.stat().st_ino == self.inode
        except OSError:
            can_be_found = False
        return not (can_be_found and self.children)

    def _kill_all(self) -> None:
        for pid, _ in self.children.values():
            for kill in (os.killpg, os.kill):
                try:
                    kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue


def bind(path: Path) -> socket.socket:
    """A listening unix socket that only this user may open. It is made before the fork, so that the
    holder can connect as soon as the answer arrives."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(128)  # a replica opens one connection per request in flight
    return listener


def _listen(path: Path) -> socket.socket:
    """Raises BadSpawn unless the directory is private and no other zygote serves this path."""
    linux.require_private(path.parent)
    lock = os.open(path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until this process ends
    except BlockingIOError as error:
        raise BadSpawn(f"{path}: another zygote serves here") from error
    return bind(path)


def _clean_environment() -> None:
    """Restarts this program with the allowed variables only, before any library reads them."""
    if os.environ.get(_MARK) == "1":
        return
    environment = linux.allowed_environment(os.environ) | {_MARK: "1"}
    command = [sys.executable, "-m", "deployments.engines.zygote", *sys.argv[1:]]
    os.execve(sys.executable, command, environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--preload", default="", help="modules to import, separated by commas")
    parser.add_argument("--linger-s", type=float, default=LINGER_S, help=argparse.SUPPRESS)
    args = parser.parse_args()
    _clean_environment()
    # Not before, because the line above starts this program anew, and both would import it.
    from deployments.engines import host

    linux.set_name("zygote")
    linux.claim_priority()
    zygote = Zygote(args.socket, args.linger_s)
    gc.disable()  # a collection between imports costs a second and shares nothing
    host.preload()
    for module in filter(None, args.preload.split(",")):
        importlib.import_module(module)
    nvidia.close_nvml()
    linux.share_code()
    gc.collect()
    gc.freeze()  # a child's collector then leaves the shared pages untouched
    zygote.run()


if __name__ == "__main__":
    main()
