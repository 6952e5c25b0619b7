"""A zygote that takes every message and answers none, unless a test says so."""

import asyncio
import json
from pathlib import Path
from types import TracebackType


class HungZygote:
    """Serves `path` while it is entered."""

    def __init__(self, folder: Path) -> None:
        self.path, self.asked = folder / "zygote.sock", asyncio.Event()
        self._writers: list[asyncio.StreamWriter] = []
        self._hearing: list[asyncio.Task[None] | None] = []

    async def __aenter__(self) -> "HungZygote":
        self._server = await asyncio.start_unix_server(self._hear, self.path)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*filter(None, self._hearing))

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self._hearing.append(asyncio.current_task())
        while await reader.readline():
            self.asked.set()

    def answer(self, **fields: int) -> None:
        """To the caller that connected last."""
        self._writers[-1].write(json.dumps(fields).encode() + b"\n")
