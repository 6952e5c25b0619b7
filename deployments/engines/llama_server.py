"""GGUF models through llama.cpp's own server: the example of an engine in one file.

A program instead of a library: `build` starts it as a child of the engine's process, `app` passes
requests on to it over a unix socket of its own, and the program ends with the engine's process,
however that ends. The program asks no connection who it is, so it is told a key that only the
engine's process knows. `engine_args` are the program's long options, by name (`ctx_size: 4096`,
`n_gpu_layers: 99`, `embedding: true`). The model is one .gguf file. Give it a `need`, because the
estimate is its size and a tenth, which leaves no bytes for a long context. The program would keep
up to 8 GiB of prompts that left its slots in host RAM, which no ticket pays for; here it keeps none
unless `cache_ram` (MiB) says so, and then its `need` has to hold them.

Needs `llama-server` on the PATH, of a version that listens on a unix socket (`--host x.sock`, since
March 2025). Source: github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md.
"""

import asyncio
import os
import secrets
import shutil
import subprocess

import aiohttp

from deployments.engines import asgi, command_line, linux
from deployments.engines.protocol import (
    MAX_SOCKET_PATH,
    CannotSleep,
    Config,
    EngineLoadFailed,
    Receive,
    Scope,
    Send,
)

PROGRAM = "llama-server"
KEY = "LLAMA_API_KEY"  # the variable: an argument could be read by every user
CACHE_RAM = "LLAMA_ARG_CACHE_RAM"  # the variable: versions without that cache refuse the argument
# What a replica may call; the routes that change the server stay out of reach.
ROUTES = frozenset("/v1/chat/completions /v1/completions /v1/embeddings /v1/models".split())
LOOK_S = 0.1  # between two calls that ask whether it has loaded, which takes it seconds
HEALTH_S = 10.0  # it answers from a thread of its own, even while it computes


def build(config: Config) -> "LlamaServer":
    """Starts the program, which reads its file while this process makes its event loop. Raises
    EngineLoadFailed."""
    path = os.environ["ARBITER_ENGINE"] + ".l.sock"  # in a folder only this user may enter
    if shutil.which(PROGRAM) is None:
        raise EngineLoadFailed("NotInstalled", f"there is no {PROGRAM} on the PATH", False)
    if len(path) > MAX_SOCKET_PATH:
        raise EngineLoadFailed("BadConfig", f"{path} is too long for a socket's path", False)
    parent, key = os.getpid(), secrets.token_hex(32)

    def become() -> None:
        os.umask(0o077)
        linux.die_with_parent(parent)

    words, env = command(config, path), {CACHE_RAM: "0"} | os.environ | {KEY: key}
    program = subprocess.Popen(words, env=env, preexec_fn=become)  # noqa: PLW1509  # one thread so far
    return LlamaServer(program, path, key)


def command(config: Config, path: str) -> list[str]:
    words = [PROGRAM, "--host", path, "--model", config["model"]]
    words += ["--alias", str(config.get("served_name", config["model"]))]
    if "threads" in config:
        words += ["--threads", str(config["threads"])]
    for name, value in config.get("engine_args", {}).items():
        if value is not False:  # few of its flags have a `--no-` form; those are named `no_...`
            words += command_line.words(name, value)
    return words


class LlamaServer:
    """The program's only client. The program cannot sleep, so a victim is unloaded."""

    can_sleep = False

    def __init__(self, program: subprocess.Popen[bytes], path: str, key: str) -> None:
        self.program, self.path = program, path
        self.headers = {"authorization": f"Bearer {key}"}
        self.session: aiohttp.ClientSession | None = None

    async def load(self) -> None:
        """Waits until the program is healthy. Raises EngineLoadFailed when it ends before that.
        When it hangs, its holder's bound on loads ends it with this process."""
        connector = aiohttp.UnixConnector(path=self.path, limit=0)  # requests wait in its queue
        self.session = aiohttp.ClientSession(
            "http://llama",
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),
            headers=self.headers,
        )
        while not await self._is_healthy():
            if (status := self.program.poll()) is not None:
                text = f"{PROGRAM} ended with {status}; the engine's log has the rest"
                # The kernel ends a process that takes too much memory by SIGKILL.
                raise EngineLoadFailed("ProgramEnded", text, status == -9)
            await asyncio.sleep(LOOK_S)
        pidfd = os.pidfd_open(self.program.pid)
        asyncio.get_running_loop().add_reader(pidfd, linux.end, 1)  # nothing serves without it

    async def _is_healthy(self) -> bool:
        assert self.session is not None
        try:
            async with self.session.get("/health") as answer:  # 503 while it loads
                return answer.status == 200
        except (aiohttp.ClientConnectionError, FileNotFoundError):
            return False

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on; a client that leaves ends it in the program too."""
        if scope["path"] not in ROUTES:
            return await asgi.refuse(send, 404, f"no route {scope['path']}")
        if (body := await asgi.read_body(receive)) is not None:
            await asgi.until_disconnected(self._pass_on(scope, body, send), receive)

    async def _pass_on(self, scope: Scope, body: bytes, send: Send) -> None:
        assert self.session is not None
        json = {"content-type": "application/json"}
        request = self.session.request(scope["method"], scope["path"], data=body, headers=json)
        async with request as answer:
            kind = answer.headers.get("content-type", "application/json").encode()
            start = {"type": "http.response.start", "status": answer.status}
            await send(start | {"headers": [(b"content-type", kind)]})
            async for part in answer.content.iter_any():
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def sleep(self) -> None:
        raise CannotSleep(f"{PROGRAM} cannot sleep")

    async def wake(self) -> None:
        raise CannotSleep(f"{PROGRAM} cannot sleep")

    async def probe(self) -> str:
        raise CannotSleep(f"{PROGRAM} cannot sleep, so nothing is compared")

    async def health(self) -> None:
        """Raises when the program does not answer in time, or not with 200."""
        async with asyncio.timeout(HEALTH_S):
            if not await self._is_healthy():
                raise RuntimeError(f"{PROGRAM} is not healthy")
