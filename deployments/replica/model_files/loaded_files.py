"""Whether the files of a model are those that it was loaded from (D5).

Three looks, from cheap to complete:

- Names, sizes, times and inodes: when the kernel tells of a change (`file_events`), before each
  request where it cannot (`remote_files`), every few seconds, and before a wake. The kernel sets a
  file's ctime at each change and no program can set it back, so equal rows mean equal files, with
  two exceptions. A second change within one tick of the kernel's clock, or through a mapping that
  was not written back yet, leaves the ctime as it was: so a file is *settled* only once it has kept
  its ctime for SETTLED_S (git calls the others racily clean). And some network file systems keep no
  ctime.
- Small files whole, and 64 pieces of each large one: before a load and before a wake, in 5 ms a
  file.
- Large files whole (`read_whole`), at a bounded rate in the background: after the load, again once
  the files are settled, and once in each sleep. Before a wake they are read whole only where they
  are not settled, which is in the first minute after they were written; a wake of 188 MiB takes
  0.26 s (docs/benchmarks.md), and to hash as much takes 0.2 s more.

So a model is not served once the files that replace it are written, wherever they are. Without
ctimes size, mtime, inode or pieces tell at once, and of any other byte the look while the model
sleeps.
"""

import asyncio
import contextlib
import hashlib
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from deployments.config.file_threads import in_thread
from deployments.config.model_content import WHOLE_BYTES, Files, contents, files
from deployments.replica.model_files import remote_files
from deployments.replica.model_files.remote_files import SharedLooks

logger = logging.getLogger("arbiter.residency")

# The kernel's clock ticks each 1-10 ms; it writes a dirty mapping back within 30 s
# (vm.dirty_expire_centisecs); NFS caches times for up to 60 s (acregmax).
SETTLED_S = 60.0
CHUNK_BYTES = 4 << 20  # hashed in 5 ms, after which the task may be cancelled
READ_BYTES_PER_S = 200e6  # a fifth of what one core hashes


@dataclass(slots=True, eq=False)
class LoadedFiles:
    """What was seen of a model's files before its engine read them, and learned of them since."""

    model: str = ""  # their folder, or the one file
    rows: Files = ()
    pieces: str = ""  # a hash of what `contents` reads; empty: they could not be read
    seen_ns: int = 0  # wall clock, as the files' times
    whole: dict[str, str] = field(default_factory=dict)  # hash of all bytes of each large file
    settled: set[str] = field(default_factory=set)  # large files whose ctime can be trusted
    is_unwatched: bool = False  # the kernel tells of no change
    looks: SharedLooks = field(default_factory=SharedLooks)

    def large(self) -> list[tuple[str, int]]:
        """Returns the names of files of which `contents` reads pieces only, each with its ctime in
        ns."""
        rows = [row for row in self.rows if len(row) > 1 and int(row[1]) > WHOLE_BYTES]
        return [(str(name), int(ctime_ns)) for name, _, _, ctime_ns, _ in rows]

    def unsettled(self) -> list[str]:
        """Returns the large files that may have changed and kept their times."""
        since_ns = self.seen_ns - round(SETTLED_S * 1e9)
        return [n for n, ctime_ns in self.large() if ctime_ns > since_ns and n not in self.settled]

    @property
    def settles_in_s(self) -> float:
        """Seconds until every ctime is old enough; 0 once it is."""
        newest_ns = max((ctime_ns for _, ctime_ns in self.large()), default=0)
        return max(0.0, SETTLED_S - (time.time_ns() - newest_ns) / 1e9)


async def look(model: str) -> LoadedFiles:
    """Looks at the files before an engine reads them; later changes are noticed. Raises OSError."""
    seen = LoadedFiles(model, seen_ns=time.time_ns())
    seen.is_unwatched = await in_thread(model, remote_files.is_remote, model)
    seen.rows = await in_thread(model, files, model)
    with contextlib.suppress(OSError):  # unknown: names, sizes and times must do
        seen.pieces = await in_thread(model, contents, model, seen.rows)
    return seen


async def has_changed(loaded: LoadedFiles) -> bool:
    """Whether names, sizes, times or inodes differ from those of the load. False for a model whose
    plan names no folder, and for files that cannot be looked at now."""
    try:
        return await in_thread(loaded.model, has_changed_now, loaded)
    except OSError as error:  # no thread for the look
        logger.warning("%s: its files are not looked at now: %s", loaded.model, error)
        return False


async def changed_during_load(loaded: LoadedFiles) -> bool:
    """Whether the files changed since the look before the load: the engine may have read some old
    files and some new ones, or half of one."""
    if loaded.is_unwatched:
        return await in_thread(loaded.model, _has_changed_on_server, loaded)
    return await has_changed(loaded)


async def changed_before_request(loaded: LoadedFiles) -> bool:
    """Looks before a request at files of which the kernel does not tell; of others False."""
    return loaded.is_unwatched and await loaded.looks.ask(
        loaded.model, lambda: _has_changed_on_server(loaded)
    )


async def changed_while_draining(loaded: LoadedFiles) -> bool:
    """Looks at the files of a model that drained, unwatched, and is to serve on. False where their
    server is away for longer than a look may take."""
    look = _has_changed_on_server if loaded.is_unwatched else has_changed_now
    return await loaded.looks.ask(loaded.model, lambda: look(loaded))


def has_changed_now(loaded: LoadedFiles) -> bool:
    """Answers as `has_changed` does, at once, for files of which this machine's kernel has told."""
    try:
        return _are_others(loaded, files(loaded.model))
    except OSError:
        return False  # not looked; the next look tells


def _has_changed_on_server(loaded: LoadedFiles) -> bool:
    """Whether the files differ from those loaded, as their server has them now."""
    try:
        return _are_others(loaded, files(loaded.model, remote_files.fresh_stat))
    except OSError:
        return False


def _are_others(loaded: LoadedFiles, now: Files) -> bool:
    unseen = {row[0] for row in (*loaded.rows, *now) if len(row) == 1}
    was, is_now = ([row for row in rows if row[0] not in unseen] for rows in (loaded.rows, now))
    return was != is_now


async def changed_in_sleep(loaded: LoadedFiles) -> bool:
    """Compares before a wake: by rows, by pieces, and by all bytes of the files that are not
    settled. A large unsettled file that was never read whole counts as changed, because nothing
    tells that it is not: its model is loaded anew, from files that lie in the page cache still."""
    if await has_changed(loaded):
        return True
    try:
        pieces_now = await in_thread(loaded.model, contents, loaded.model, loaded.rows)
        if loaded.pieces not in ("", pieces_now):
            return True
        for name in loaded.unsettled():
            if loaded.whole.get(name) != await _hash_of(loaded, name, pause_s=0.0):
                return True
    except OSError:
        pass  # not looked either; once it is awake, it is watched
    return False


async def read_whole(loaded: LoadedFiles) -> bool:
    """Reads each large file from end to end. True: one has other bytes than when it was read
    before. Files that kept their times for SETTLED_S are settled by it. A file that cannot be read
    tells nothing."""
    settles = loaded.settles_in_s == 0.0
    for name, _ in loaded.large():
        with contextlib.suppress(OSError):
            digest = await _hash_of(loaded, name, CHUNK_BYTES / READ_BYTES_PER_S)
            if loaded.whole.setdefault(name, digest) != digest:
                return True
            if settles:
                loaded.settled.add(name)
    return False


async def _hash_of(loaded: LoadedFiles, name: str, pause_s: float) -> str:
    """Hashes all bytes of a file, chunk by chunk, so that no thread is kept and the task can be
    cancelled. Raises OSError."""
    digest, path = hashlib.blake2b(), Path(loaded.model) / name
    thread = f"{loaded.model} whole"  # not that of the looks, which requests wait for
    stream = await in_thread(thread, path.open, "rb")
    try:
        while await in_thread(thread, _feed, digest, stream):
            await asyncio.sleep(pause_s)
    finally:
        # In the thread too, and not waited for: closing waits for a read under way, which takes
        # minutes where a file server is away, and this task may be cancelled in the middle of one.
        in_thread(thread, stream.close)
    return digest.hexdigest()


def _feed(digest: Any, stream: BinaryIO) -> bool:
    """Hashes one more chunk. False at the end of the stream."""
    chunk = stream.read(CHUNK_BYTES)
    digest.update(chunk)
    return bool(chunk)
