"""What two other forms of the pool would cost or give (docs/adr/0019, docs/adr/0047).

    python -m benchmarks.pool_alternatives --extents 60 --bodies 30

A ticket for the pool: before each extent its writer would ask the arbiter, as a resident asks for
growth. Measured are that question, on a real cluster with 32 MiB a time, and what a writer does
now, which reads its limit in the slab and takes the pages. Then the arbiter is killed: how long the
question waits, and how long the longest extent takes meanwhile.

Temporary rows: the body of a request would lie in a slab, of which its engine gets the descriptor,
in place of passing a socket. Measured are both ways for bodies of 1 and 32 MiB between two
processes, until the other has read each byte.
"""

import argparse
import asyncio
import mmap
import multiprocessing
import os
import socket
import time
import zlib
from contextlib import closing
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import ray

from arbiter.pool import Slab, SlabView, create
from arbiter.pool.layout import EXTENT_BYTES
from arbiter.units import KIB, MIB, Bytes, Content
from benchmarks import report
from benchmarks.report import Sample
from tests.conftest import ENVIRONMENT
from tests.support.live_arbiter import capability, kill, live_arbiter, model

MODEL_MIB, BUDGET_MIB = 20, 8_000
KILLS = 5
BODIES_MIB = (1, 32)
PIECE = 256 * KIB  # how much of a body one read of a socket takes at most


class Extents:
    """A slab that takes an extent a time and gives it back, outside what is timed."""

    def __init__(self, fd: int) -> None:
        self._view = SlabView(fd)
        self._view.limit_bytes = self._view.capacity
        self._slab = Slab(fd, Content.KV, b"n" * 32, Bytes(64 * KIB))

    def take_ms(self) -> tuple[float, float]:
        """Reading how much it may have, and then taking the pages."""
        began = time.perf_counter()
        assert self._slab.permitted_bytes
        read = time.perf_counter()
        assert self._slab.grow()
        took = time.perf_counter()
        self._slab.cut(Bytes(0))
        return (read - began) * 1e3, (took - read) * 1e3

    def close(self) -> None:
        self._slab.file.close()
        self._view.close()


async def extents(count: int) -> dict[str, Any]:
    read: list[float] = []
    took: list[float] = []
    asked, waits, meanwhile = [], [], [0.0]
    fd = create("extents", Bytes(8 * EXTENT_BYTES))
    with closing(Extents(fd)) as slab:
        async with live_arbiter({"chat": capability(a=model(MODEL_MIB))}, mib=BUDGET_MIB) as d:
            holder = d.holder()
            await holder.ask.remote("a")
            for _ in range(count):  # interleaved, because a machine's speed drifts
                asked.append(await holder.grant_ms.remote("a", EXTENT_BYTES))
                for values, ms in zip((read, took), slab.take_ms(), strict=True):
                    values.append(ms)
            for _ in range(KILLS):
                kill(await d.arbiter_pid())
                began = time.perf_counter()
                question = holder.grant_ms.remote("a", EXTENT_BYTES)
                while not ray.wait([question], timeout=0.02)[0]:
                    meanwhile.append(sum(slab.take_ms()))
                await question
                waits.append(time.perf_counter() - began)
    os.close(fd)
    return {
        "limit_read_us": Sample(tuple(ms * 1e3 for ms in read)),
        "extent_ms": Sample(tuple(took)),
        "ticket_ms": Sample(tuple(asked)),
        "ticket_after_a_kill_s": Sample(tuple(waits)),
        "slowest_extent_meanwhile_ms": max(meanwhile),
    }


def receive(by_socket: socket.socket, told: Connection, sizes: list[tuple[str, int]]) -> None:
    """The engine's side: has each byte of a body, and says so."""
    for way, size in sizes:
        if way == "socket":
            body, at = bytearray(size), 0
            view = memoryview(body)
            while at < size:
                at += by_socket.recv_into(view[at : at + PIECE])
            told.send(zlib.crc32(body))
        else:
            fd = recv_handle(told)
            with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapped:
                told.send(zlib.crc32(mapped))
            os.close(fd)


def body_ms(way: str, body: bytes, by_socket: socket.socket, told: Connection, pid: int) -> float:
    """From having a body to the other side's word that it has it."""
    began = time.perf_counter()
    if way == "socket":
        by_socket.sendall(body)
    else:
        fd = os.memfd_create("body", os.MFD_CLOEXEC)
        view = memoryview(body)
        while view:
            view = view[os.write(fd, view) :]
        send_handle(told, fd, pid)
        os.close(fd)
    assert told.recv() == zlib.crc32(body)
    return (time.perf_counter() - began) * 1e3


def bodies(count: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for mib in BODIES_MIB:
        body = os.urandom(mib * MIB)
        ours, theirs = socket.socketpair()
        told, teller = multiprocessing.Pipe()
        ways = [(way, len(body)) for _ in range(count) for way in ("socket", "slab")]
        other = multiprocessing.get_context("fork").Process(
            target=receive, args=(theirs, teller, ways)
        )
        other.start()
        assert other.pid is not None
        ms: dict[str, list[float]] = {"socket": [], "slab": []}
        for way, _ in ways:
            ms[way].append(body_ms(way, body, ours, told, other.pid))
        other.join()
        figures[f"{mib}_mib"] = {f"{way}_ms": Sample(tuple(took)) for way, took in ms.items()}
        for end in (ours, theirs, told, teller):
            end.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--extents", type=int, default=60)
    parser.add_argument("--bodies", type=int, default=30)
    args = parser.parse_args()
    figures: dict[str, Any] = {"bodies": bodies(args.bodies)}
    os.environ.update(ENVIRONMENT)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        figures["extents"] = asyncio.run(extents(args.extents))
    finally:
        ray.shutdown()
    report.write("pool_alternatives", figures)
    for name, value in (*figures["extents"].items(), *figures["bodies"].items()):
        print(name, {k: str(v) for k, v in value.items()} if isinstance(value, dict) else value)


if __name__ == "__main__":
    main()
