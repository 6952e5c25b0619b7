"""Start the two things that are compared: our graph, and a bare `vllm serve` of the same model."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from deployments.config.start_variables import VARIABLES
from tests.support.engine_host import zygote

BIN = Path(sys.executable).parent

_OBJECTS = {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "0"}
_THREADS = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1",
}
# Other ways to carry a request between Serve's processes, as changes to the above.
TRANSPORTS: dict[str, dict[str, str]] = {
    "default": {},
    "ray": _OBJECTS | _THREADS,  # a plain `serve run`
    "grpc": _THREADS,
    "haproxy": {"RAY_SERVE_ENABLE_HA_PROXY": "1"},
}


def wait_for(url: str, within_s: float, process: subprocess.Popen[bytes] | None = None) -> float:
    """Seconds until the address answers 200. Raises RuntimeError when it never does."""
    start = time.perf_counter()
    while time.perf_counter() - start < within_s:
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"the server behind {url} ended with {process.returncode}")
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return time.perf_counter() - start
        time.sleep(0.02)
    raise RuntimeError(f"{url} did not answer within {within_s:.0f} s")


def wait_for_free(port: int, within_s: float) -> None:
    """Until nothing answers there: the processes of a graph outlive its `serve run` by some
    seconds, and would answer for the next. Raises RuntimeError."""
    deadline_s = time.perf_counter() + within_s
    while time.perf_counter() < deadline_s:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.02)
    raise RuntimeError(f"port {port} is still taken after {within_s:.0f} s")


@contextlib.contextmanager
def running(
    command: list[str], env: dict[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A process group that is gone afterwards."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, env=os.environ | env, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield process
    finally:
        for sign, within_s in ((signal.SIGINT, 60), (signal.SIGKILL, 10)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(within_s)
                break


def vllm_flags(engine_args: dict[str, Any]) -> list[str]:
    """The same engine arguments as flags of `vllm serve`."""
    flags = []
    for key, value in engine_args.items():
        name = "--" + key.replace("_", "-")
        if isinstance(value, bool):
            flags.append(name if value else name.replace("--", "--no-", 1))
        elif isinstance(value, list):
            flags += [name, *map(str, value)]
        else:
            flags += [name, json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


@contextlib.contextmanager
def bare_vllm(model: str, name: str, engine_args: dict[str, Any], port: int) -> Iterator[str]:
    """`vllm serve`, ready. Yields its address. Started by its module, which is the same server:
    the `vllm` script of the CPU distribution stops at looking up its own version."""
    server = "vllm.entrypoints.openai.api_server"
    command = [sys.executable, "-m", server, "--model", model, "--served-model-name", name]
    command += ["--host", "127.0.0.1", "--port", str(port), *vllm_flags(engine_args)]
    with running(command, {"VLLM_LOGGING_LEVEL": "WARNING"}, _log("vllm")) as process:
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/health", 180, process)
        yield url


@contextlib.contextmanager
def our_graph(config: dict[str, Any], transport: str) -> Iterator[str]:
    """`serve run` of a configuration, front ready. Yields its address."""
    port = config["http_options"]["port"]
    wait_for_free(port, 60)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "serve_config.yaml"
        file.write_text(yaml.safe_dump(config))
        command = [str(BIN / "serve"), "run", str(file)]
        env = VARIABLES | TRANSPORTS[transport] | own_state()
        with running(command, env, _log("serve")) as process:
            url = f"http://127.0.0.1:{port}"
            wait_for(f"{url}/health", 180, process)
            yield url


@contextlib.contextmanager
def engine_alone(model: str, name: str, engine_args: dict[str, Any], **more: Any) -> Iterator[str]:
    """One engine child, ready, with no Ray before it. Yields its address for benchmarks.load."""
    with zygote("deployments.engines.vllm.preload") as running:
        config = {"model": model, "served_name": name, "engine_args": engine_args, **more}
        child = running.spawn("alone", "deployments.engines.vllm.engine:build", config).hold()
        status, body = child.ready()
        assert status == 200, body
        yield f"unix:{child.path}"
        child.let_go()


def own_state() -> dict[str, str]:
    """The variable that gives the arbiter a state file apart from the user's, whose settings and
    keys then bear on no figure. It is kept from run to run, so that sizes and seconds of loads are
    known as on a machine that has run for a while."""
    return {"XDG_STATE_HOME": str(_folder() / "state")}


def _log(name: str) -> Path:
    return _folder() / f"{name}.log"


def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / "serve-arbiter-benchmarks"
    folder.mkdir(exist_ok=True)
    return folder
