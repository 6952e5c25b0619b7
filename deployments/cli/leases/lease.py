"""`arbiter lease --gb 2 -- python train.py`: a command that holds leased memory while it runs.

The command runs once the memory is granted. When a model needs it, the command's process group gets
a signal, and at the end of the notice SIGKILL.
"""

import json
import math
import os
import signal
import subprocess
import sys
from typing import Annotated, Any

import typer

from arbiter import leases
from arbiter.errors import RequestError
from arbiter.leases import LeaseLost
from arbiter.units import GIB
from deployments.cli.http import Url, address, api_key
from deployments.cli.leases.foreground import foreground, was_suspended
from deployments.cli.output import CommandError, say, size, working

LOOK_S = 0.2  # how late the end of the command, or the notice, may be seen


def _size(text: str) -> int:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise typer.BadParameter(f"{text!r} is not a size; write 2GiB, 500MB or bytes") from None


def _signal(name: str) -> str:
    full = f"SIG{name.upper().removeprefix('SIG')}"
    if full not in signal.Signals.__members__:
        raise typer.BadParameter(f"no signal {name!r}; `kill -l` lists them")
    return full


def lease(
    words: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The command, after `--`.")],
    gb: Annotated[float | None, typer.Option(help="GiB that the command will hold.")] = None,
    size_text: Annotated[
        str | None, typer.Option("--size", help="The same with a unit: 500MiB, 2GiB, 4GB.")
    ] = None,
    name: Annotated[
        str, typer.Option(help="The lease's name in lists. Default: the command.")
    ] = "",
    preemptible: Annotated[
        bool, typer.Option("--preemptible", help="The command may be ended for models.")
    ] = False,
    notice_s: Annotated[float, typer.Option(help="Seconds from signal to kill.")] = 10.0,
    term_s: Annotated[float, typer.Option(help="Seconds it may hold the memory.")] = 3600.0,
    within_s: Annotated[
        float | None, typer.Option(help="Give up when it is not granted within so many seconds.")
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(help="This machine's node, from `arbiter status`, if there are several."),
    ] = None,
    signal_name: Annotated[
        str, typer.Option("--signal", callback=_signal, help="The signal sent as notice.")
    ] = "TERM",
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Report as JSON lines on stderr; stdout is the command's own."),
    ] = False,
    url: Url = None,
) -> None:
    """Run a command while it holds device memory. Exits as the command does."""
    need_bytes = _need(gb, size_text)
    where = address(url)
    held = leases.ask(
        need_bytes / GIB,
        name=name or os.path.basename(words[0]),
        preemptible=preemptible,
        notice_s=notice_s,
        term_s=term_s,
        node=node,
        way=leases.HttpTransport(where, api_key(where)),
    )
    try:
        with working(f"waiting for {size(need_bytes)}"):
            held.acquire(within_s)
        code = _run(words, held, signal.Signals[signal_name], as_json)
    except (RequestError, LeaseLost, OSError) as error:
        raise CommandError(str(error)) from error
    raise typer.Exit(code)


def _need(gb: float | None, text: str | None) -> int:
    """Raises BadParameter unless exactly one of both says more than nothing."""
    if (gb is None) == (text is None):
        raise typer.BadParameter("say how much by one of --gb and --size")
    if text is not None:
        size_bytes = _size(text)
    elif gb is not None and math.isfinite(gb):
        size_bytes = round(gb * GIB)
    else:
        size_bytes = 0
    if size_bytes <= 0:
        raise typer.BadParameter("a lease needs more than 0 bytes")
    return size_bytes


def run_command(words: list[str], held: leases.Lease, as_json: bool) -> int:
    """Runs a command under a lease that is held; its notice is SIGTERM. Returns the exit status."""
    return _run(words, held, signal.SIGTERM, as_json)


def _run(words: list[str], held: leases.Lease, notice: signal.Signals, as_json: bool) -> int:
    """The command's exit status, as a shell has it."""
    try:
        _report(as_json, held, "held")
        code = _attended(words, held, notice, as_json)
        _report(as_json, held, "ended", exit_code=code)
        return code
    finally:
        held.release()


def _attended(words: list[str], held: leases.Lease, notice: signal.Signals, as_json: bool) -> int:
    running: list[subprocess.Popen[bytes]] = []
    early: list[signal.Signals] = []  # signals that came before the command ran

    def forward(number: int, _: object) -> None:
        for process in running:
            _send(process, signal.Signals(number))
        if not running:
            early.append(signal.Signals(number))

    before = {s: signal.signal(s, forward) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        process = subprocess.Popen(words, env=os.environ | _environment(held), process_group=0)
        running.append(process)
        for number in early:
            _send(process, number)
        held.measure(process.pid)
        with foreground(process):
            if not _ends_before_notice(process, held):
                _report(as_json, held, "leaving", reason=held.reason, left_s=held.left_s)
                _send(process, notice)
                _wait(process, held.left_s or 0.0)
        return process.returncode if process.returncode >= 0 else 128 - process.returncode
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _ends_before_notice(process: subprocess.Popen[bytes], held: leases.Lease) -> bool:
    while not held.notice.is_set() and process.poll() is None:
        if was_suspended(process):
            say("arbiter lease: a command that holds memory is not suspended", "yellow")
            _send(process, signal.SIGCONT)
        held.notice.wait(LOOK_S)
    return process.poll() is not None


def _report(as_json: bool, held: leases.Lease, state: str, **more: Any) -> None:
    """Each step as a line of JSON; a person reads only why the signal comes."""
    if as_json:
        line = {"lease": held.id, "state": state, "devices_bytes": held.devices, **more}
        print(json.dumps(line), file=sys.stderr, flush=True)
    elif state == "leaving":
        left_s = held.left_s or 0.0
        say(f"arbiter lease: {held.reason}; the command has {left_s:.0f} s to end", "yellow")


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
    """The command knows its lease, and sees the lease's GPUs and no others."""
    ids = [d.rsplit("gpu:", 1)[1] for d in held.devices if "gpu:" in d]
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(ids), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return {"ARBITER_LEASE": held.id} | (visible if ids else {})
