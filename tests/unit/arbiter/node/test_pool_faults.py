"""A pool whose disk fills up and stalls, whose RAM runs short and whose writers are killed at any
moment: nothing is served that was not written whole, and nothing is left over."""

import contextlib
import hashlib
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from threading import Event

import pytest

from arbiter.node import pool as pools
from arbiter.node.pool import Pool
from arbiter.node.slab_files import SlabFiles
from arbiter.pool import Removal, Rows, SavedRows, Slab, slab_file
from arbiter.pool.layout import tenant_digest
from arbiter.protocol.messages import SlabRequest
from arbiter.units import MIB, Bytes, Content, TicketId

SPACE = b"n" * 32
ROW = Bytes(2 * MIB)
REQUESTS = [SlabRequest(Content.KV, f"chat/{name}", name) for name in "ab"]
KEYS = [f"key {number}".encode() for number in range(20)]
ACME = tenant_digest("acme")
ACTS = 60


def content_of(key: bytes, owner: str) -> bytes:
    return hashlib.sha256(key + owner.encode()).digest() * (ROW // 32)


class Disk:
    """The real one, of which each write may fail for want of room or wait until it is let go."""

    def __init__(self, random: Random) -> None:
        self.random, self.may_go_on, self.is_full = random, Event(), False
        self.may_go_on.set()

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """The kernel refuses every file of more than some MiB, also a larger slab."""
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        soft = self.random.randrange(0, 8 * MIB)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


class Chaos:
    def __init__(self, seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random, self.folder, self.patch = Random(seed), folder, monkeypatch
        self.disk = Disk(self.random)
        files = SlabFiles(folder, Bytes(40 * MIB))
        self.pool = Pool(Bytes(256 * MIB), files)
        self.writers: dict[TicketId, tuple[SlabRequest, Slab, Rows]] = {}
        self.served_count = 0
        self.ticket_count = 0
        write = os.pwrite

        def slow_write(fd: int, data: bytes | memoryview, offset: int) -> int:
            assert self.disk.may_go_on.wait(60)
            return write(fd, data, offset)

        monkeypatch.setattr(slab_file.os, "pwrite", slow_write)

    def start(self) -> None:
        """An engine of some model, unless it has one."""
        request = self.random.choice(REQUESTS)
        self.ticket_count += 1
        ticket = TicketId(str(self.ticket_count))
        fd, file = self.pool.lend(ticket, request), self.pool.file_for(request)
        if fd is None:
            return
        slab = Slab(fd, Content.KV, SPACE, ROW)
        rows = Rows(slab, 3600.0, time.time)
        self.writers[ticket] = request, slab, rows
        self.look(rows, request.owner)
        if file:
            self.restore(Path(file), request.owner, rows)

    def look(self, rows: Rows, owner: str) -> None:
        """Whatever is served has the bytes of its key."""
        for key in KEYS:
            row = rows.lookup(key)
            if row is not None:
                self.served_count += 1
                assert bytes(rows.slab.row(row)) == content_of(key, owner)

    def restore(self, file: Path, owner: str, rows: Rows) -> None:
        now_s = time.time()
        with contextlib.closing(SavedRows(file, Content.KV, SPACE, ROW, now_s)) as saved:
            for key in list(saved.keys):
                for row in rows.reserve([key]).rows.values():
                    if saved.read(key, rows.slab.row(row)):
                        mark = saved.mark(key)
                        assert mark is not None
                        rows.mark_restored(mark)
                    else:
                        rows.abandon(key)
        self.look(rows, owner)

    def write(self) -> None:
        """Some rows, of which the last one may stay half written."""
        if not self.writers:
            return
        request, slab, rows = self.writers[self.random.choice(sorted(self.writers))]
        wanted = self.random.sample(KEYS, self.random.randrange(1, 8))
        tenant = ACME if self.random.random() < 0.3 else bytes(16)
        found = rows.reserve(wanted, tenant=tenant).rows
        for number, (key, row) in enumerate(found.items()):
            whole = content_of(key, request.owner)
            if number == len(found) - 1 and self.random.random() < 0.3:
                slab.row(row)[: ROW // 2] = whole[: ROW // 2]
                return  # it stays reserved until the engine is killed
            slab.row(row)[:] = whole
            rows.mark_ready(key, tenant)

    def kill(self) -> None:
        if self.writers:
            ticket = self.random.choice(sorted(self.writers))
            self.writers.pop(ticket)[1].close()
            self.pool.take_back(ticket)

    def turn(self) -> None:
        """Of the agent: with enough RAM, with too little, or with almost none."""
        total, has = 10**12, int(self.pool.allocated_bytes)
        kept = self.random.choice([0, 10**9, 10**9, has])
        available = self.random.choice([10**11] * 4 + [max(0, kept - has)])
        self.pool._kept_free_bytes = kept
        self.patch.setattr(pools.procfs, "ram", lambda: (Bytes(total), Bytes(available)))
        self.pool.enforce_budget()
        for _, _, rows in self.writers.values():
            rows.shrink_to_limit()

    def fill_the_disk(self) -> None:
        with self.disk.full():
            self.turn()
            self.write()
            self.settle()

    def stall_the_disk(self) -> None:
        self.disk.may_go_on.clear()
        self.turn()
        self.random.choice([self.start, self.kill, self.write, self.turn])()
        self.disk.may_go_on.set()

    def remove_tenant(self) -> None:
        self.pool.drop_tenant(Removal(ACME))

    def settle(self) -> None:
        assert self.pool.files is not None
        self.pool.files._thread.submit(lambda: None).result(60)

    def check_files(self) -> None:
        """Whole ones only, within their budget."""
        self.settle()
        assert self.pool.files is not None
        assert self.pool.files.size_bytes <= self.pool.files.budget_bytes
        assert not list(self.folder.glob("*.tmp"))

    def end(self) -> None:
        while self.writers:
            self.kill()
        self.pool.save_idle()
        self.check_files()
        self.pool.close()


def left_open(folder: Path) -> list[str]:
    """Slabs and files in the folder that this process has open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    own = ("/memfd:host-pool-kv.a.chat/a", "/memfd:host-pool-kv.b.chat/b", str(folder))
    return [target for target in found if target.startswith(own)]


@pytest.fixture
def in_ram() -> Iterator[Path]:
    """A folder whose files need no disk, so that thousands of saves are quick."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        yield Path(made)


@pytest.mark.spec("E4", "E5", "G4")
@pytest.mark.parametrize("seed", range(4))
def test_whatever_fails_what_is_served_is_whole_and_nothing_is_left_over(
    seed: int, in_ram: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chaos = Chaos(seed, in_ram / "slabs", monkeypatch)
    acts = [chaos.start, chaos.write, chaos.write, chaos.write, chaos.kill, chaos.turn]
    acts += [chaos.fill_the_disk, chaos.stall_the_disk, chaos.remove_tenant]
    for _ in range(ACTS):
        chaos.random.choice(acts)()
        chaos.check_files()
        for request, _, rows in chaos.writers.values():
            chaos.look(rows, request.owner)
    chaos.end()
    assert chaos.served_count > 0
    assert left_open(in_ram) == []
