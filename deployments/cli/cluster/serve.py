"""`arbiter serve FILE`: `serve run` as a child, whose lines go into a file, until the next request
is as fast as any; then a box with what a person needs to go on.

Each step ends with a real sign of the system: what Ray writes, the front's answers, and what the
node agents say of their zygotes (`/ready`).
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from deployments import progress
from deployments.cli.output import AsJson, CommandError
from deployments.config import start_variables

Ready = dict[str, Any]  # the body of `/ready`

LOOK_S = 0.2  # between two looks for a sign
ANSWER_S = 5.0  # of the front to one look
# How long a capability may read `failed` before the start counts it: Serve may not have come to it.
SETTLE_S = 10.0
LOGS_KEPT = 10
LINES = 20  # of the log, where it failed
RAY = re.compile(r"(?:Started a local Ray instance|Connected to Ray cluster)")
DASHBOARD = re.compile(r"dashboard at\s+(?:\x1b\[[\d;]*m)*(http://[\w.:\[\]-]+)")
RULE = "-" * 78
PROGRAM = [str(Path(sys.executable).with_name("serve")), "run"]
PROMPT = "What is a ticket?"


@dataclass(frozen=True, slots=True)
class Configured:
    """What the starter reads of a configuration that `arbiter check` has passed."""

    host: str
    port: int
    capabilities: dict[str, Any]

    @property
    def url(self) -> str:
        """The front's URL for a client on this machine."""
        name = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        return f"http://{f'[{name}]' if ':' in name else name}:{self.port}"


def read(file: Path) -> Configured:
    """Raises CommandError."""
    import yaml

    try:
        raw = yaml.safe_load(file.read_text())
        http = raw.get("http_options") or {}
        [front] = [app for app in raw["applications"] if app.get("name") == "front"]
        table = front["deployments"][0]["user_config"]["capabilities"]
        return Configured(http.get("host", "127.0.0.1"), http.get("port", 8000), table)
    except (OSError, yaml.YAMLError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CommandError(f"{file}: {error!r}; `arbiter init` writes one") from error


@dataclass(slots=True)
class Child:
    """The running `serve run`, and the file that has its lines."""

    process: subprocess.Popen[bytes]
    log: Path
    is_told_to_end: bool = False
    _over: threading.Event = field(default_factory=threading.Event)

    def end(self, *_: object) -> None:
        """Forwards a signal: `serve run` ends Serve and Ray on SIGINT, and on no other."""
        self.is_told_to_end = True
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def until(self, sign: Callable[[], bool]) -> bool:
        """Whether the sign came before the child ended or was told to."""
        while not self.is_told_to_end and self.process.poll() is None:
            if sign():
                return True
            time.sleep(LOOK_S)
        return False

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def show_as_it_comes(self) -> None:
        """Copies the log to the terminal as it grows (VERBOSE=1)."""

        def copy() -> None:
            with self.log.open(errors="replace") as lines:
                while True:
                    if line := lines.readline():
                        sys.stdout.write(line)
                        sys.stdout.flush()
                    elif self._over.wait(LOOK_S):
                        return

        threading.Thread(target=copy, daemon=True).start()

    def wait(self) -> int:
        """Its exit status, as a shell would have it."""
        status = self.process.wait()
        self._over.set()
        return status if status >= 0 else 128 - status


def serve(
    file: Annotated[Path, typer.Argument(help="A configuration.")] = Path("serve_config.yaml"),
    as_json: AsJson = False,
) -> None:
    """Start all that a configuration names, and say when it is ready; Ctrl-C ends it."""
    began_s, configured, steps = time.monotonic(), read(file), progress.Steps()
    _refuse_taken(configured)
    log = _new_log()
    with steps.step("configuration") as note:
        _check(file, log, note)
    if ended := _forget_ended_cluster():
        print(f"the cluster of Ray at {ended} has ended; this start makes another", file=sys.stderr)
    child = _start(file, log)
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, child.end)
    try:
        ready = _until_ready(child, configured.url, steps)
    except BaseException:
        child.end()
        child.wait()
        raise
    if ready is not None:
        start_facts = facts(configured, ready, child, time.monotonic() - began_s)
        print(json.dumps(start_facts) if as_json else "\n".join(box(start_facts)), flush=True)
        child.until(lambda: False)
    if child.is_told_to_end:
        with steps.step("stopping"):
            status = child.wait()
    else:
        status = child.wait()
        last = "\n".join(child.text.splitlines()[-LINES:])
        print(f"{last}\n`serve run` ended with {status}; its log: {log}", file=sys.stderr)
    raise typer.Exit(status)


def _check(file: Path, log: Path, note: progress.Note) -> None:
    """Checks the file in a process of its own, which gives back what it imports. Raises
    CommandError."""
    command = [sys.executable, "-m", "deployments.cli", "check", str(file)]
    try:
        progress.run(command, log, note)
    except progress.ProgramFailed as error:
        raise CommandError(error.last) from error


def _refuse_taken(configured: Configured) -> None:
    """Raises CommandError where another program listens at the front's address: its answers would
    be taken for those of the system that starts."""
    at = configured.url.removeprefix("http://").rpartition(":")[0].strip("[]")
    try:
        socket.create_connection((at, configured.port), ANSWER_S).close()
    except OSError:
        return
    raise CommandError(
        f"something listens at {configured.url} already. Is it running? End that, or choose another"
        " `http_options.port`; a running system takes a new configuration by `serve deploy`"
    )


def _new_log() -> Path:
    """An empty file for this start; the oldest of earlier starts go."""
    from deployments.config.environment import Environment

    folder = Environment().logs
    folder.mkdir(parents=True, exist_ok=True)
    for old in sorted(folder.glob("serve-*.log"))[: -LOGS_KEPT + 1]:
        old.unlink(missing_ok=True)
    log = folder / f"serve-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    log.touch()
    return log


def _forget_ended_cluster() -> str:
    """Deletes the file in which Ray keeps the address of this machine's last cluster, where that
    cluster has ended: Ray would try to join it for minutes, because a cluster that is killed leaves
    the file behind. Returns the address that the deleted file had, else an empty text."""
    if os.environ.get("RAY_ADDRESS"):
        return ""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    note = Path(folder, "ray", "ray_current_cluster")
    try:
        named = note.read_text().strip()
        if not _is_refused(named):
            return ""
        note.unlink(missing_ok=True)
    except (OSError, ValueError):
        return ""  # there is no file, or it names another machine, or its text is no address
    return named


def _is_refused(named: str) -> bool:
    """Whether nothing listens at an address of this machine. Raises OSError where it is none of
    its own, and ValueError where it is no address."""
    host, _, port = named.rpartition(":")
    if not host or not 0 < int(port) < 1 << 16:
        raise ValueError(named)
    with socket.socket() as probe:
        probe.bind((host, 0))
    try:
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except ConnectionRefusedError:
        return True
    return False


def _start(file: Path, log: Path) -> Child:
    """Starts `serve run` in a session of its own, so that Ctrl-C reaches it once, from here."""
    command, env = [*PROGRAM, str(file)], start_variables.completed(os.environ)
    # A shell's `&` leaves SIGINT ignored, and a child of an ignoring process ignores it as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with log.open("ab") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
    child = Child(process, log)
    if progress.is_verbose():
        child.show_as_it_comes()
    return child


def _until_ready(child: Child, url: str, steps: progress.Steps) -> Ready | None:
    """What `/ready` said last; None where the child ended, or is to end."""
    ready: Ready = {}

    def look(good: Callable[[Ready], bool], note: progress.Note) -> bool:
        ready.update(ask_ready(url) or {})
        note(_words(ready))
        return bool(ready) and good(ready)

    with steps.step("Ray") as note:
        if not child.until(lambda: RAY.search(child.text) is not None or _answers(url)):
            return None
    with steps.step("front") as note:
        if not child.until(lambda: _answers(url)):
            return None
    with steps.step("arbiter and node agents") as note:
        if not child.until(lambda: look(lambda ready: bool(ready["nodes"]), note)):
            return None
    with steps.step("imports of engines") as note:
        if not child.until(lambda: look(_is_warm, note)):
            return None
    with steps.step("capabilities") as note:
        settled_s = time.monotonic() + SETTLE_S
        if not child.until(
            lambda: look(lambda ready: not failures(ready), note) or time.monotonic() > settled_s
        ):
            return None
    return ready


def _is_warm(ready: Ready) -> bool:
    """Raises CommandError where a node can start no engine."""
    for node, row in ready["nodes"].items():
        if row["state"] == "failed":
            raise CommandError(f"no engine can start on {node}: its zygote {row['cause']}")
    return all(row["state"] == "ready" for row in ready["nodes"].values())


def _words(ready: Ready) -> str:
    nodes = [row["state"] for row in ready.get("nodes", {}).values()]
    causes = [row["cause"] for row in ready.get("nodes", {}).values() if row.get("cause")]
    return "; ".join([f"{nodes.count('ready')} of {len(nodes)} nodes", *causes]) if nodes else ""


def failures(ready: Ready) -> dict[str, str]:
    """Capability to the cause for which it serves nothing."""
    rows = ready["capabilities"].items()
    return {name: row.get("cause", "") for name, row in rows if row["state"] == "failed"}


def _answers(url: str) -> bool:
    return _get(f"{url}/health") is not None


def ask_ready(url: str) -> Ready | None:
    """Returns the body of `/ready`; None while no front or no arbiter answers. The status may be
    503: it is where all capabilities failed."""
    reply = _get(f"{url}/ready")
    try:
        ready = json.loads(reply or b"{}")
    except ValueError:
        return None
    return ready if "nodes" in ready else None


def _get(url: str) -> bytes | None:
    """The body of an answer of the front, of whatever status; None without one, or where Serve's
    proxy says that there is no route."""
    import httpx

    try:
        answer = httpx.get(url, timeout=ANSWER_S, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
    return answer.content if answer.is_success or answer.status_code == 503 else None


def facts(configured: Configured, ready: Ready, child: Child, took_s: float) -> dict[str, Any]:
    """What a person or program needs to go on."""
    url, failed = configured.url, failures(ready)
    dashboard = DASHBOARD.search(child.text)
    return {
        "ready_s": round(took_s, 1),
        "url": url,
        "console": f"{url}/" if _get(f"{url}/") is not None else None,
        "dashboard": dashboard[1] if dashboard else None,
        "log": str(child.log),
        "serves": [name for name in ready["capabilities"] if name not in failed],
        "failed": failed,
        "try": curl(url, configured.capabilities),
    }


def box(start_facts: dict[str, Any]) -> list[str]:
    """The same in lines; the request to paste has one for itself."""
    url, good = start_facts["url"], start_facts["serves"]
    rows = [
        ("API", f"{url}/v1 (OpenAI), {url} (Anthropic, Ollama), {url}/openapi.json"),
        ("console", start_facts["console"]),
        ("dashboard", start_facts["dashboard"]),
        ("log", start_facts["log"]),
        ("serves", ", ".join(good)),
        *(("failed", f"{name}: {cause}") for name, cause in start_facts["failed"].items()),
    ]
    took = f"ready after {start_facts['ready_s']:.0f} s; Ctrl-C ends it"
    return [
        RULE,
        took if good else "nothing can be served",
        *(f"  {name:10} {text}" for name, text in rows if text),
        "",
        start_facts["try"],
        RULE,
    ]


def curl(url: str, capabilities: dict[str, Any]) -> str:
    """A request to paste, in one line: to the first model that chats, else for what there is."""
    for row in capabilities.values():
        if row.get("role") == "text" and row.get("models") and not row.get("paths"):
            messages = [{"role": "user", "content": PROMPT}]
            body = json.dumps({"model": next(iter(row["models"])), "messages": messages})
            head = "-H 'content-type: application/json'"
            return f"curl -s {url}/v1/chat/completions {head} -d '{body}'"
    return f"curl -s {url}/v1/models"
