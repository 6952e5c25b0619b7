"""`arbiter lease --gb 2 -- python train.py`: a command that holds leased memory while it runs.

The command runs once the memory is there. When somebody needs it, the command's process group gets
a signal, and at the end of the notice it is killed: whoever started a process may end it.
"""

import argparse
import os
import signal
import subprocess
from collections.abc import Callable
from typing import Any

from arbiter import leases

LOOK_S = 0.2  # how late the end of the command, or notice, may be seen
Add = Callable[..., argparse.ArgumentParser]


def add_to(add: Add, run: Callable[[argparse.Namespace], None], *parents: Any) -> None:
    """The parser of `arbiter lease`; its runner is given, as it needs the caller's key."""
    about = "Run a command while holding device memory."
    parser = add("lease", run, about, *parents)
    parser.add_argument("--gb", type=float, required=True, help="GiB the command will hold")
    parser.add_argument("--name", default="", help="what people see (default: the command)")
    parser.add_argument("--preemptible", action="store_true", help="may be ended for others")
    parser.add_argument("--notice-s", type=float, default=10.0, help="from signal to kill")
    parser.add_argument("--term-s", type=float, default=3600.0, help="at most (default: an hour)")
    parser.add_argument("--within-s", type=float, help="give up if it is not granted by then")
    parser.add_argument("--node", help="this machine's, as `arbiter status` names it, of several")
    parser.add_argument("--signal", default="TERM", help="of the notice (default: TERM)")
    parser.add_argument("words", nargs="+", metavar="COMMAND", help="after `--`")


def run(args: argparse.Namespace, key: str) -> int:
    """The command's exit status, as a shell has it. Raises RequestError, LeaseLost, OSError."""
    name = args.name or os.path.basename(args.words[0])
    held = leases.ask(
        args.gb,
        name=name,
        preemptible=args.preemptible,
        notice_s=args.notice_s,
        term_s=args.term_s,
        node=args.node,
        way=leases.HttpTransport(args.url, key),
    )
    held.acquire(args.within_s)
    try:
        return _run(args.words, held, signal.Signals[f"SIG{args.signal.removeprefix('SIG')}"])
    finally:
        held.release()


def _run(words: list[str], held: leases.Lease, notice: signal.Signals) -> int:
    process = subprocess.Popen(words, env=os.environ | _environment(held), process_group=0)
    forward = [signal.SIGINT, signal.SIGTERM]
    before = {s: signal.signal(s, lambda s, _: _send(process, signal.Signals(s))) for s in forward}
    try:
        held.measure(process.pid)
        while not held.notice.is_set() and process.poll() is None:
            held.notice.wait(LOOK_S)
        if process.poll() is None:
            print(f"arbiter lease: {held.reason}; the command must end", flush=True)
            _send(process, notice)
            _wait(process, held.left_s or 0.0)
        return process.returncode if process.returncode >= 0 else 128 - process.returncode
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(process: subprocess.Popen[bytes], within_s: float) -> None:
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        _send(process, signal.SIGKILL)
        process.wait()


def _send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


def _environment(held: leases.Lease) -> dict[str, str]:
    """The command knows its lease, and sees the GPUs of it and no others."""
    ids = [d.rsplit("gpu:", 1)[1] for d in held.devices if "gpu:" in d]
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(ids), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return {"ARBITER_LEASE": held.id} | (visible if ids else {})
