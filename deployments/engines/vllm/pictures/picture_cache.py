"""Projected pictures over the rows of a slab: the last `ENTRIES`, each `TERM_S` from its last use.

A picture is embeddings, shape [count, width]. It lies in as many rows of ROW_EMBEDDINGS as it
needs, and is there when all of them are. A row's key has the picture's identity, its count of
embeddings and the number of the row, so that what was found has the shape that was asked for.

The scheduler asks whether a picture is there before it runs the encoder, and a yes that is not kept
ends the engine. So a yes pins the rows until the worker has loaded them.
"""

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from arbiter.pool import Rows
from arbiter.pool.layout import NO_TENANT

ENTRIES, TERM_S = 32, 300.0
ROW_EMBEDDINGS = 64
_COUNT_BYTES, _PART_BYTES = 4, 2


@dataclass(frozen=True, slots=True)
class RequestedPicture:
    """A picture of a request. `identity`: vLLM's. `tenant`: its digest, as rows name it."""

    identity: str
    count: int
    tenant: bytes = NO_TENANT
    asked_s: float | None = None  # when the request came

    @property
    def keys(self) -> list[bytes]:
        """The keys of its rows, in order."""
        head = hashlib.sha256(self.identity.encode()).digest()
        head += self.count.to_bytes(_COUNT_BYTES)
        return [head + part.to_bytes(_PART_BYTES) for part in range(_parts(self.count))]


def _parts(count: int) -> int:
    return -(-count // ROW_EMBEDDINGS)


@dataclass(frozen=True, slots=True)
class Copy:
    """What a worker copies between one picture and its rows. `rows`: by part; parts that lie in
    their rows already are left out."""

    picture: RequestedPicture
    rows: dict[int, int]


@dataclass(slots=True)
class Copies:
    """The copies that one step of the engine makes."""

    loads: list[Copy] = field(default_factory=list)
    saves: list[Copy] = field(default_factory=list)


class PictureCache:
    """The scheduler's side: which picture lies in which rows. `entries`: the most pictures that are
    kept."""

    def __init__(self, rows: Rows, entries: int = ENTRIES) -> None:
        self.rows, self.entries = rows, entries
        self.encoder_runs = 0  # pictures that this process had to encode
        # Of the step that the scheduler is putting together, by identity: the pictures that it may
        # ask for, and the copies of those that it was promised, whose rows are pinned.
        self._expected: dict[str, RequestedPicture] = {}
        self._promised: dict[str, Copy] = {}
        self._copies = Copies()

    def expect(self, pictures: Iterable[RequestedPicture]) -> None:
        """Notes pictures that the scheduler may ask for by their identities alone."""
        self._expected |= {picture.identity: picture for picture in pictures}

    def promise(self, identity: str) -> bool:
        """Whether the rows have the picture. If so they are pinned until the picture is loaded, or
        until the step ends without it."""
        picture = self._expected.get(identity)
        if picture is None:
            return False
        if identity in self._promised:
            return True
        keys = picture.keys
        if not all(key in self.rows for key in keys):
            return False
        self._promised[identity] = Copy(picture, dict(enumerate(self.rows.pin(keys))))
        self.rows.touch(keys)
        return True

    def begin(self, identity: str) -> None:
        """Notes that the step will have the picture, and counts that. The picture comes from its
        rows if it was promised; else the encoder makes it, and it is copied into rows if there is
        room for them."""
        picture = self._expected.get(identity)
        if picture is None:
            return
        promised = self._promised.pop(identity, None)
        self.rows.count_use(is_hit=promised is not None)
        if promised is not None:
            self._copies.loads.append(promised)
        else:
            self.encoder_runs += 1
            self._reserve(picture)

    def _reserve(self, picture: RequestedPicture) -> None:
        keys = picture.keys
        places = {key: part for part, key in enumerate(keys)}
        reserved = self.rows.reserve(keys, tenant=picture.tenant, asked_s=picture.asked_s)
        if any(key not in reserved.rows and key not in self.rows for key in keys):
            for key in reserved.rows:
                self.rows.abandon(key)
            return  # there is no room, or an earlier step still writes the rows of this picture
        rows = {places[key]: row for key, row in reserved.rows.items()}
        self._copies.saves.append(Copy(picture, rows))

    def count_hit(self) -> None:
        """Counts a picture that the device has, because another request reads it."""
        self.rows.count_use(is_hit=True)

    def end_step(self, unread: Collection[str] = ()) -> Copies:
        """Returns what the worker has to copy in this step, and drops the promises that no request
        used. `unread`: identities of pictures that no request reads at the end of the step, because
        their request was preempted in the same step. They are not copied: the step may leave the
        worker without work, and then it would never report the end of their copies."""
        self._take_back(unread)
        for promised in self._promised.values():
            self.rows.unpin(promised.picture.keys)
        self._promised.clear()
        self._expected.clear()
        copies, self._copies = self._copies, Copies()
        return copies

    def _take_back(self, unread: Collection[str]) -> None:
        """Ends the copies of this step for pictures that it does not have any more."""
        for load in [load for load in self._copies.loads if load.picture.identity in unread]:
            self._copies.loads.remove(load)
            self.rows.unpin(load.picture.keys)
        for save in [save for save in self._copies.saves if save.picture.identity in unread]:
            self._copies.saves.remove(save)
            self._end_save(save, is_whole=False)

    def finish(self, copies: Copies, saved: Iterable[str]) -> None:
        """Ends the copies of a step that the workers have done. `saved`: the identities of the
        pictures whose rows they wrote."""
        whole = set(saved)
        for load in copies.loads:
            self.rows.unpin(load.picture.keys)
        for save in copies.saves:
            self._end_save(save, is_whole=save.picture.identity in whole)
        self._bound()

    def _end_save(self, save: Copy, *, is_whole: bool) -> None:
        keys = save.picture.keys
        for part in save.rows:
            if is_whole:
                self.rows.mark_ready(keys[part], save.picture.tenant)
            else:
                self.rows.abandon(keys[part])

    def _pictures(self) -> dict[bytes, list[bytes]]:
        """The keys of the rows of each picture, complete or not, the least recently used picture
        first."""
        pictures: dict[bytes, list[bytes]] = {}
        for key in self.rows.keys():
            pictures.setdefault(key[:-_PART_BYTES], []).append(key)
        return pictures

    def _bound(self) -> None:
        pictures = list(self._pictures().values())
        for keys in pictures[: max(0, len(pictures) - self.entries)]:
            self.rows.evict(keys)

    def expire(self) -> None:
        """Drops pictures past their term, and gives memory back when none is left."""
        self.rows.expire()
        if not len(self.rows):
            self.rows.clear()

    def purge(self) -> None:
        """Drops all that no step reads or writes, and gives their memory back."""
        self.rows.clear()

    def shrink(self) -> None:
        """Gives back what the slab's owner no longer permits."""
        self.rows.shrink_to_limit()

    def facts(self) -> dict[str, int]:
        """Pictures, and how many this process encoded; and of the slab, which may have had other
        writers, its hits and misses (each was a run of the encoder), rows and bytes."""
        sizes = {head: len(keys) for head, keys in self._pictures().items()}
        counts = {head: int.from_bytes(head[-_COUNT_BYTES:]) for head in sizes}
        whole = [head for head, count in counts.items() if sizes[head] == _parts(count)]
        return {
            **self.rows.slab.facts(),
            "entries": len(whole),
            "most_entries": self.entries,
            "embeddings": sum(counts[head] for head in whole),
            "encoder_runs": self.encoder_runs,
        }
