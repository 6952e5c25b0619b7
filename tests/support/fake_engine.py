"""An engine that is honest about memory and obedient about everything else.

It holds real, touched, private bytes, so the kernel measures it. In `engine_args`: bytes and
kv_cache_memory_bytes, load_seconds, fail (memory, error, hang), chunks and chunk_seconds of a
streamed answer, stays (ends neither with its lifeline nor on SIGTERM, and says so), litter (leaves
a temporary file and a block of shared memory), forget (its probe changes after a wake, until the
next load or "for good"), sick (its health), told (a file that says how this load fails; empty: it
does not), gate (a file for which a load waits at its end, and says so by a file beside it), purged
(a file that is there once its caches are emptied), kept (a file that says since when it has kept
the KV of requests), prewarm_fails (why), hoard (bytes that it keeps from its second request on). A
body's `until` names a file at which its stream ends before all chunks.
"""

import _posixshmem  # type: ignore[import-not-found]
import asyncio
import json
import mmap
import os
import signal
import tempfile
from multiprocessing import shared_memory
from pathlib import Path

from deployments.engines import linux
from deployments.engines.asgi import refuse, respond
from deployments.engines.protocol import Config, Receive, Scope, Send
from deployments.routing.pieces import KeptKv

# Every page is touched.
TOUCHED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE


class FakeEngine:
    def __init__(self, config: Config) -> None:
        self.name = config.get("served_name", "fake")
        self.can_sleep: bool = config.get("can_sleep", True)
        self.args = config.get("engine_args", {})
        self.size = sum(int(self.args.get(of, 0)) for of in ("bytes", "kv_cache_memory_bytes"))
        self.wakes = 0
        self.requests_count = 0
        self.hoarded: list[mmap.mmap] = []

    async def load(self) -> None:
        if self.args.get("stays"):
            signal.signal(signal.SIGTERM, lambda *_: print("SIGTERM: stays", flush=True))
            linux.end = _stay  # type: ignore[assignment]
        if self.args.get("litter"):
            name = shared_memory._make_filename()  # type: ignore[attr-defined]
            os.close(_posixshmem.shm_open(name, os.O_CREAT | os.O_RDWR, 0o600))
            os.close(tempfile.mkstemp()[0])
        await asyncio.sleep(float(self.args.get("load_seconds", 0)))
        if gate := self.args.get("gate"):
            await _pass(Path(gate))
        told = self.args.get("told")
        fail = Path(told).read_text() if told else self.args.get("fail")
        if fail == "hang":
            await asyncio.Event().wait()
        if fail:
            raise {"memory": MemoryError, "error": RuntimeError}[fail](f"told to fail: {self.size}")
        self._allocate()
        if self.args.get("forget") != "for good":
            self.wakes = 0

    def _allocate(self) -> None:
        self.held = mmap.mmap(-1, max(64, self.size), TOUCHED)

    def _hoard(self) -> None:
        self.requests_count += 1
        if self.requests_count == 2 and "hoard" in self.args:
            self.hoarded.append(mmap.mmap(-1, int(self.args["hoard"]), TOUCHED))

    async def sleep(self) -> None:
        self.copy = os.memfd_create("host-copy-fake")
        with os.fdopen(os.dup(self.copy), "wb") as file:
            file.write(self.held)
        self.held.close()

    async def wake(self) -> None:
        self._allocate()
        self.held[:] = mmap.mmap(self.copy, 0)
        os.close(self.copy)
        self.wakes += 1

    async def probe(self) -> str:
        return self.held[:64].hex() + (str(self.wakes) if self.args.get("forget") else "")

    async def purge(self) -> None:
        if file := self.args.get("purged"):
            Path(file).touch()

    async def health(self) -> None:
        assert not self.args.get("sick"), "told to be sick"

    def kept_kv(self) -> KeptKv:
        file = Path(self.args.get("kept", os.devnull))
        return KeptKv(float(file.read_text() or 0) if file.exists() else 0.0)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = json.loads((await receive())["body"] or b"{}")
        if scope["path"] == "/prewarm":
            if fails := self.args.get("prewarm_fails"):
                return await refuse(send, 500, fails)
            return await respond(send, 200, {"prompt_tokens": 7, "cached_tokens": 0})
        self._hoard()
        if scope["path"] == "/v1/embeddings":
            row = {"object": "embedding", "index": 0, "embedding": [0.6, 0.8]}
            return await respond(send, 200, {"object": "list", "data": [row], "model": self.name})
        if not body.get("stream"):
            return await respond(send, 200, self._chat("message", self.args.get("chunks", 1)))
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        until = body.get("until")
        for _ in range(self.args.get("chunks", 1)):
            if until is not None and Path(until).exists():
                break
            await asyncio.sleep(float(self.args.get("chunk_seconds", 0)))
            data = f"data: {json.dumps(self._chat('delta', 1))}\n\n".encode()
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    def _chat(self, part: str, words: int) -> dict[str, object]:
        choice = {"index": 0, part: {"role": "assistant", "content": "x " * words}}
        kind = "chat.completion" + ".chunk" * (part == "delta")
        return {"id": "fake", "object": kind, "created": 0, "model": self.name, "choices": [choice]}


async def _pass(gate: Path) -> None:
    gate.with_suffix(".reached").touch()
    while not gate.exists():
        await asyncio.sleep(0.01)


def _stay(status: int) -> None:
    print("lifeline: stays", flush=True)


build = FakeEngine
