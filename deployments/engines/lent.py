"""What the node agent lends to an engine, handed over by descriptor at the engine's start (L4): the
slabs that it may write, and a copy of its model's files (shared_copy), which it may read.
"""

import json
import logging
import os
import socket
import time

from arbiter.protocol.peer_credentials import peer_uid
from deployments.engines.protocol import Config

logger = logging.getLogger("arbiter.engine")

# How long the node agent may take to hand over all slabs, and as long again for a copy: by so much
# an agent that hangs delays a load. It answers in a millisecond, on a busy node in seconds; where
# it has ended, its socket refuses at once.
CALL_S = 10.0
FILES_MOST = 253  # descriptors in one message (SCM_MAX_FD)
_LINE_BYTES = 64


def receive(path: str, ticket: str, key: str, within_s: float = CALL_S) -> list[int]:
    """Returns the descriptors of what the node agent lent to a ticket under that key. Raises
    OSError, also where it lent nothing."""
    if within_s <= 0:
        raise TimeoutError("the node agent has not answered before")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
        agent.settimeout(within_s)
        agent.connect(path)
        if peer_uid(agent) != os.getuid():
            raise PermissionError(f"{path} belongs to user {peer_uid(agent)}")
        agent.sendall(json.dumps({"ticket": ticket, "key": key}).encode() + b"\n")
        _, fds, _, _ = socket.recv_fds(agent, _LINE_BYTES, FILES_MOST)
    if not fds:
        raise FileNotFoundError(f"the node agent lent {ticket} nothing under the key {key}")
    for fd in fds:
        os.set_inheritable(fd, False)
    return fds


def with_slabs(config: Config) -> Config:
    """Returns the config with the `path` of each slab that the agent lent to this engine, in place
    of the `socket` at which the agent hands them over. The path is that of a descriptor in this
    process, so that the engine's core and workers can open the slab even if the agent ends
    meanwhile. A slab that is not handed over is left out, and the engine loads without it."""
    if "slabs" not in config:
        return config
    slabs: dict[str, Config] = {}
    ends_s = time.monotonic() + CALL_S
    for content, facts in config["slabs"].items():
        if "socket" not in facts:
            slabs[content] = facts
            continue
        try:
            [fd] = receive(facts["socket"], facts["ticket"], content, ends_s - time.monotonic())
        except OSError as error:
            logger.warning("keeps no %s in a slab, because it was handed none: %s", content, error)
            continue
        rest = {name: facts[name] for name in facts.keys() - {"socket", "ticket"}}
        slabs[content] = rest | {"path": f"/proc/{os.getpid()}/fd/{fd}"}
    return config | {"slabs": slabs}
