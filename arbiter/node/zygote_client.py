"""Starts, finds and speaks to the node's zygote, the process that engines are forked from.

Lines of JSON over a unix socket in a 0700 directory; both ends check the other's user.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arbiter.errors import ArbiterError, error_fields
from arbiter.protocol.messages import AgentSettings, SpawnSpec
from arbiter.protocol.peer_credentials import peer_uid
from arbiter.units import DeviceId, NodeId, TicketId

# An answer other than to the first ping is a fork away, or two where a message waits for the answer
# to another. Imports of a cold disk can take a minute, and a message sent meanwhile waits for them.
ANSWER_S = 10.0
IMPORTS_S = 180.0
TAIL_LINES, TAIL_BYTES = 3, 4_096  # of its log, in an error that a client may read
MAX_LINE_BYTES = 1 << 20  # `list` with thousands of children; the zygote has the same bound


MARK = "ARBITER_ZYGOTE=1"  # in the environment of a zygote, and of all it forked


@error_fields
class ZygoteError(ArbiterError):
    """Says that the zygote is away, so that asking again may help, or that it refused."""

    message: str
    is_away: bool = False

    def __str__(self) -> str:
        return f"zygote: {self.message}"


@dataclass(frozen=True, slots=True)
class ChildRow:
    ticket: TicketId
    pid: int
    socket: Path


class Zygote:
    """Calls a zygote over one connection, made when it is first needed and again after it broke.
    Calls do not overlap."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = asyncio.Lock()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ping(self, within_s: float) -> int:
        """Returns its pid, once its imports are done. Raises ZygoteError."""
        reply = await self._ask({"op": "ping"}, within_s)
        return int(reply["pid"])

    async def spawn(self, ticket: TicketId, spec: SpawnSpec, path: Path) -> int:
        """Returns the pid of the new child; that of the old one when the ticket has a child
        already. The caller knows that the zygote's imports are done."""
        message = {
            "op": "spawn",
            "ticket": ticket,
            "entry": spec.entry,
            "config": spec.config,
            "env": spec.env,
            "socket": str(path),
        }
        return int((await self._ask(message, ANSWER_S))["pid"])

    async def list(self) -> tuple[ChildRow, ...]:
        reply = await self._ask({"op": "list"}, ANSWER_S)
        return tuple(
            ChildRow(TicketId(c["ticket"]), int(c["pid"]), Path(c["socket"]))
            for c in reply["children"]
        )

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _ask(self, message: dict[str, Any], within_s: float) -> dict[str, Any]:
        """Sends a message and returns the answer. The wait for the answers to earlier messages
        counts: a zygote that hangs gives none. Raises ZygoteError."""
        try:
            async with asyncio.timeout(within_s), self._lock:
                reply = await self._round_trip(message)
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
            raise ZygoteError(f"{message['op']}: {error!r}", is_away=True) from error
        if "error" in reply:
            raise ZygoteError(str(reply["error"]))
        return reply

    async def _round_trip(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            if self._streams is None:
                self._streams = await _connect(self._path)
            reader, writer = self._streams
            writer.write(json.dumps(message).encode() + b"\n")
            await writer.drain()
            line = await reader.readuntil(b"\n")
            reply: dict[str, Any] = json.loads(line)
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.CancelledError):
            self.close()  # its answer would be taken for the next one's
            raise
        return reply


async def _connect(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_unix_connection(path, limit=MAX_LINE_BYTES)
    uid = peer_uid(writer.get_extra_info("socket"))
    if uid != os.getuid():
        writer.close()
        raise PermissionError(f"{path} belongs to user {uid}")
    return reader, writer


def equipped(spec: SpawnSpec, scratch: Path, uuids: Mapping[DeviceId, str]) -> SpawnSpec:
    """Returns a spec whose engine sees the GPUs of its ticket and no others, from its first
    instruction on, and leaves its temporary files where they end with it. `uuids`: of this node's
    GPUs."""
    gpus = sorted(
        (d.device for d in spec.devices if "gpu:" in d.device),
        key=lambda device: int(device.rsplit("gpu:", 1)[1]),
    )
    # CUDA counts anew without a GPU that fell off the bus, so an index may mean another card to it.
    ids = [uuids.get(device) or device.rsplit("gpu:", 1)[1] for device in gpus]
    # NVML counts by bus, CUDA by speed unless told.
    by_bus = {"CUDA_VISIBLE_DEVICES": ",".join(ids), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return replace(spec, env=spec.env | {"TMPDIR": str(scratch)} | (by_bus if ids else {}))


def start(settings: AgentSettings, path: Path, log: Path) -> int:
    """Starts a zygote that serves `path`, and returns its pid. It is no child of ours and has a
    session of its own, so that neither Ray, which ends the children of a dying worker, nor the
    agent's death takes it along: its children are engines with requests in flight. Raises
    ZygoteError, OSError."""
    command = [sys.executable, "-m", settings.zygote_module]
    command += ["--socket", str(path), "--preload", ",".join(settings.preload)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        started = subprocess.run(
            ["/bin/sh", "-c", '"$@" >>"$0" 2>&1 & echo $!', str(log), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=environment,  # what this process can import, the zygote can
            start_new_session=True,
            check=True,
            timeout=ANSWER_S,
        )
        return int(started.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        raise ZygoteError(f"its shell failed: {error!r}", is_away=True) from error


def tail(log: Path, from_bytes: int) -> str:
    """Returns the last words written after `from_bytes`: of a traceback, what was raised and
    where."""
    with log.open("rb") as file:
        file.seek(max(from_bytes, log.stat().st_size - TAIL_BYTES))
        text = file.read().decode(errors="replace").strip()
    return " | ".join(text.splitlines()[-TAIL_LINES:]) or "it wrote nothing"


def folder(settings: AgentSettings, node: NodeId) -> Path:
    """Makes the folder of one node's sockets. Every step of the way must be ours alone, or a
    stranger could put another in its place."""
    if settings.folder:
        return private_folder(Path(settings.folder))
    return private_folder(private_folder(Path(f"/tmp/arbiter-{os.getuid()}")) / node)


def private_folder(path: Path) -> Path:
    """Makes `path`, 0700 and ours. Raises PermissionError: a stranger's would see our sockets."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if status.st_uid != os.getuid() or path.is_symlink():
        raise PermissionError(f"{path} belongs to user {status.st_uid}; remove it")
    path.chmod(0o700)
    return path
