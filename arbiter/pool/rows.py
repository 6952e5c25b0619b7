"""The rows of one slab, as its writer finds, keeps and loses them.

A row is free, reserved (its bytes are being written), or READY. The least recently used row is
evicted first, and of one prefix the tail before the head, because a block is of use only with all
that come before it. Pins are counted here and end with the process.
"""

import heapq
import itertools
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from arbiter.errors import RowMisused
from arbiter.pool import layout
from arbiter.pool.layout import NO_TENANT, Count, Mark, Removal, Term
from arbiter.pool.slab import Slab
from arbiter.pool.tenants import TenantRows
from arbiter.units import Bytes

SWEEP_S = 60.0  # expired rows are looked for at most so often (G4)
# Between two uses: times of doubles around 2e9 are 2.4e-7 apart, and their order must last.
_TICK_S = 1e-6
ERASED_AT_ONCE = 64  # rows, so that a step waits some 50 ms at most where rows have 2 MiB


@dataclass(frozen=True, slots=True)
class Reserved:
    """Holds rows to write, by their keys, and the keys that had to leave for them."""

    rows: dict[bytes, int]
    evicted: list[bytes] = field(default_factory=list)


class _Claim(NamedTuple):
    """Says whose a reserved row will be, and when the request for it came."""

    tenant: bytes
    asked_s: float


class Rows:
    """Finds, pins, reserves and evicts the rows of a slab. Adopts those that an earlier writer left
    READY and that have not expired. `clock` returns wall-clock seconds. `term_s`: how long a row
    stays after a use of the class `long`; each use names its class, and a row expires with the
    latest of its uses (G4). `most`: rows beyond so many are not used, however much memory the slab
    may take. `caps`: which part of the rows a tenant may have, by its digest; without an entry,
    all."""

    def __init__(
        self,
        slab: Slab,
        term_s: float,
        clock: Callable[[], float],
        *,
        most: int = sys.maxsize,
        caps: Mapping[bytes, float] | None = None,
    ) -> None:
        self.slab, self._clock, self._most = slab, clock, most
        self._terms_s = {**layout.TERMS_S, Term.LONG: term_s}
        # Told before a tenant's rows are erased, so that no other source brings them back.
        self.before_erasure: Callable[[Removal], None] = lambda removal: None
        self._buffer, self._counts = slab.file.buffer, slab.file.counts
        self._ready: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._reserved: dict[bytes, int] = {}
        self._tenants = TenantRows(caps or {})
        self._caps_changed = False
        self._claims: dict[bytes, _Claim] = {}  # of reserved rows
        # By tenant. A person removes each, so they are few.
        self._removed: dict[bytes, Removal] = {}
        self._forgotten: list[int] = []  # rows that are free once no write of theirs can come
        self._pins: dict[bytes, int] = {}
        self._marks: dict[bytes, Mark] = {}  # of READY rows
        self._free: list[int] = []  # a heap: low rows first, so that the tail empties
        self._known_count = 0  # rows below it are in one of the collections above
        self._last_use_s = 0.0
        # The latest use of a row that left because others were used later. Rows that left by their
        # term or a tenant's cap are left out: they say nothing of other rows as old.
        self.lost_used_s = 0.0
        self.capped_used_s: dict[bytes, float] = {}  # the same of what left for its tenant's cap
        self._next_sweep_s = 0.0
        self._adopt()

    def _adopt(self) -> None:
        now, slab = self._clock(), self.slab
        by_age = sorted((mark.used_s, row, mark) for row, mark in slab.marks())
        for used_s, row, mark in by_age:
            if row < self._most and layout.is_live(mark.expires_s, now):
                # Of a key that is there twice, by a move that was not finished, either is whole.
                self._ready[mark.key] = row
                self._marks[mark.key] = mark
                self._last_use_s = max(self._last_use_s, min(used_s, now))
        for key in self._ready:
            tenant = self._marks[key].tenant
            self._tenants.add(tenant, 1)
            self._tenants.note_use(tenant, key)
        taken = set(self._ready.values())
        for row in layout.marked_rows(self._buffer, slab.geometry.rows_count):
            if row not in taken:
                layout.clear_mark(self._buffer, row)
        self._known_count = self._usable_count
        self._free = [row for row in range(self._known_count) if row not in taken]
        self._counts[Count.READY] = len(self._ready)

    @property
    def _usable_count(self) -> int:
        return min(self.slab.usable_count, self._most)

    def __len__(self) -> int:
        """Returns how many rows are READY."""
        return len(self._ready)

    def lookup(self, key: bytes) -> int | None:
        """Returns the row of a key, if it is READY and has not expired."""
        mark = self._marks.get(key)
        if mark is not None and mark.expires_s > self._clock():
            self._counts[Count.HITS] += 1
            return self._ready[key]
        if mark is not None and key not in self._pins:
            self._forget(key)
        self._counts[Count.MISSES] += 1
        return None

    def __contains__(self, key: bytes) -> bool:
        """Says whether `lookup` would find a key. Counts nothing."""
        mark = self._marks.get(key)
        return mark is not None and mark.expires_s > self._clock()

    def count_use(self, *, is_hit: bool) -> None:
        """Counts a use of something that has several rows, as `lookup` does of one."""
        self._counts[Count.HITS if is_hit else Count.MISSES] += 1

    def keys(self) -> list[bytes]:
        """Returns the keys of all READY rows, the least recently used first."""
        return list(self._ready)

    def is_reserved(self, key: bytes) -> bool:
        """Says whether the bytes of a key's row are being written."""
        return key in self._reserved

    def pin(self, keys: Collection[bytes]) -> list[int]:
        """Returns the rows of keys, which stay as they are until `unpin`. Raises RowMisused, and
        then pins none."""
        for key in keys:
            if key not in self._ready:
                raise RowMisused(key.hex(), "pinned, and it is not READY")
        for key in keys:
            self._pins[key] = self._pins.get(key, 0) + 1
        self._counts[Count.LOADED] += len(keys)
        return [self._ready[key] for key in keys]

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Takes one pin off each key. Raises RowMisused."""
        for key in keys:
            pins = self._pins.get(key, 0)
            if pins == 0:
                raise RowMisused(key.hex(), "unpinned, and it has no pin")
            if pins == 1:
                del self._pins[key]
            else:
                self._pins[key] = pins - 1

    def count(self, what: Count, more: int) -> None:
        """Adds to what this writer counts."""
        self._counts[what] += more

    def forget_in_flight(self, but: Collection[bytes] = ()) -> None:
        """Drops all pins, and forgets all reserved rows but these: what was asked for them is void.
        They are free after `free_forgotten`, because a write that was under way may still reach
        them."""
        self._pins.clear()
        for key in [key for key in self._reserved if key not in but]:
            self._tenants.add(self._claims.pop(key).tenant, -1)
            self._forgotten.append(self._reserved.pop(key))

    def free_forgotten(self) -> None:
        """Frees the rows of `forget_in_flight`: all writes that were under way then are over."""
        for row in self._forgotten:
            heapq.heappush(self._free, row)
        self._forgotten.clear()

    def touch(self, keys: Iterable[bytes], term: Term = Term.LONG) -> None:
        """Notes that keys are used: the last one is the most recent. Keys that are not READY are
        left out. Of a prefix, give the tail first."""
        marks, ready, now_s = self._marks, self._ready, self._clock()
        note_use = self._tenants.note_use if self._tenants.capped else None
        expires_s = now_s + self._terms_s[term]
        for key in keys:
            mark = marks.get(key)
            if mark is None:
                continue
            used_s = self._last_use_s = max(now_s, self._last_use_s + _TICK_S)
            of = Mark(key, expires_s, used_s, mark.tenant, term, mark.asked_s)
            if expires_s < mark.expires_s:
                of = mark._replace(used_s=used_s)
            marks[key] = of
            ready.move_to_end(key)
            if note_use:
                note_use(mark.tenant, key)
            layout.write_use(self._buffer, ready[key], of)

    def _times(self, term: Term) -> tuple[float, float]:
        """Returns when a row that is used now expires, and the time of its use, which is later than
        that of the last use, so that the order outlives this process."""
        now = self._clock()
        self._last_use_s = max(now, self._last_use_s + _TICK_S)
        return now + self._terms_s[term], self._last_use_s

    def reserve(
        self,
        keys: Collection[bytes],
        keep: Set[bytes] = frozenset(),
        *,
        tenant: bytes = NO_TENANT,
        term: Term = Term.LONG,
        asked_s: float | None = None,
    ) -> Reserved:
        """Returns rows for those keys that are neither READY nor reserved; READY ones count as
        used. Evicts what it must, but no key of `keys` or `keep`; a tenant at its cap loses rows of
        its own. Keys that find no room are left out, the last first, and counted. So is all that a
        request asks for which came before its tenant was removed. `asked_s`: when the request came,
        in wall-clock seconds; None: now."""
        ready, reserved = self._ready, self._reserved
        new = [key for key in dict.fromkeys(keys) if key not in ready and key not in reserved]
        self.touch([key for key in keys if key in ready][::-1], term)
        evicted: list[bytes] = []
        claim = _Claim(tenant, self._clock() if asked_s is None else asked_s)
        most = 0 if self._is_removed(claim) else len(new)
        if most and self._tenants.is_capped(tenant):
            evicted, most = self._keep_to_cap(tenant, most, set(keys), keep)
        if most > len(self._free):
            evicted += self._make_room(most, set(keys), keep)
        rows = {key: heapq.heappop(self._free) for key in new[: min(most, len(self._free))]}
        self._reserved |= rows
        self._claims |= dict.fromkeys(rows, claim)
        self._tenants.add(tenant, len(rows))
        self._counts[Count.REFUSED] += len(new) - len(rows)
        return Reserved(rows, evicted)

    def _is_removed(self, claim: _Claim) -> bool:
        removal = self._removed.get(claim.tenant)
        return removal is not None and removal.covers(*claim)

    def _keep_to_cap(self, tenant: bytes, count: int, *keep: Set[bytes]) -> tuple[list[bytes], int]:
        """Evicts the least recently used rows of a tenant until so many more are within its cap.
        Returns their keys, and how many more are."""
        cap = self._cap(tenant)
        over = self._tenants.held(tenant) + min(count, cap) - cap
        own = self._tenants.ready(tenant)
        idle = (key for key in own if key not in self._pins and not any(key in s for s in keep))
        victims = list(itertools.islice(idle, max(0, over)))
        if victims:
            self.capped_used_s[tenant] = max(self._marks[key].used_s for key in victims)
        for key in victims:
            self._evict(key)
        return victims, max(0, min(count, cap - self._tenants.held(tenant)))

    def _cap(self, tenant: bytes) -> int:
        slab = self.slab
        most = min(self._most, slab.permitted_bytes // slab.geometry.row_bytes)
        return self._tenants.cap(tenant, most)

    def set_caps(self, caps: Mapping[bytes, float]) -> None:
        """Replaces `caps`. With the next `shrink_to_limit` a tenant loses what it has beyond."""
        self._tenants.set_fractions(caps, ((self._marks[key].tenant, key) for key in self._ready))
        self._caps_changed = True

    def _shrink_to_caps(self) -> list[bytes]:
        """Returns the keys that left. Pinned and reserved rows stay for a later call."""
        gone: list[bytes] = []
        for tenant in self._tenants.capped:
            gone += self._keep_to_cap(tenant, 0)[0]
        held = ((t, self._tenants.held(t)) for t in self._tenants.capped)
        self._caps_changed = any(count > self._cap(tenant) for tenant, count in held)
        return gone

    def _make_room(self, count: int, *keep: Set[bytes]) -> list[bytes]:
        evicted = self._sweep_now_and_then()
        while len(self._free) < count and self._known_count < self._most and self.slab.grow():
            self._learn_of_growth()
        if len(self._free) < count:
            idle = (key for key in self._ready if key not in self._pins)
            free = (key for key in idle if not any(key in kept for kept in keep))
            victims = list(itertools.islice(free, count - len(self._free)))
            self._evict_oldest(victims)
            evicted += victims
        return evicted

    def _learn_of_growth(self) -> None:
        for row in range(self._known_count, self._usable_count):
            heapq.heappush(self._free, row)
        self._known_count = self._usable_count

    def mark_ready(self, key: bytes, tenant: bytes = NO_TENANT, term: Term = Term.LONG) -> None:
        """Makes a reserved row visible; its bytes are there. It is the most recently used one.
        Raises RowMisused."""
        expires, used = self._times(term)
        claim = self._claims.get(key)
        asked_s = claim.asked_s if claim else used  # without a claim it is refused below
        self._show(Mark(key, expires, used, tenant, term, asked_s))
        self._counts[Count.STORED] += 1

    def mark_restored(self, saved: Mark) -> None:
        """Marks a row READY that came back from a file: it keeps its tenant, its class and
        its expiry until the asker uses it. Raises RowMisused."""
        _, used = self._times(Term.LONG)
        self._show(saved._replace(used_s=used))
        self._counts[Count.RESTORED] += 1

    def _show(self, mark: Mark) -> None:
        row = self._reserved.pop(mark.key, None)
        if row is None:
            raise RowMisused(mark.key.hex(), "marked READY, and it is not reserved")
        self._tenants.add(self._claims.pop(mark.key).tenant, -1)
        self._tenants.add(mark.tenant, 1)
        self._tenants.note_use(mark.tenant, mark.key)
        layout.write_mark(self._buffer, row, mark)
        self._ready[mark.key] = row
        self._marks[mark.key] = mark
        self._counts[Count.READY] = len(self._ready)

    def abandon(self, key: bytes) -> None:
        """Frees a reserved row that will not be written. Raises RowMisused."""
        row = self._reserved.pop(key, None)
        if row is None:
            raise RowMisused(key.hex(), "abandoned, and it is not reserved")
        self._tenants.add(self._claims.pop(key).tenant, -1)
        heapq.heappush(self._free, row)

    def drop(self, key: bytes) -> None:
        """Frees a READY row. Raises RowMisused."""
        if key not in self._ready:
            raise RowMisused(key.hex(), "freed, and it is not READY")
        if key in self._pins:
            raise RowMisused(key.hex(), f"freed, and it has {self._pins[key]} pins")
        self._forget(key)

    def evict(self, keys: Iterable[bytes]) -> None:
        """Frees those of the keys that are READY and have no pin."""
        for key in keys:
            if key in self._ready and key not in self._pins:
                self._evict(key)

    def clear(self) -> None:
        """Frees all rows that have no pin, and gives back what pages it can."""
        self.evict(self.keys())
        self._cut_to(self._end_of_fixed(0), Bytes(0))

    def expire(self) -> list[bytes]:
        """Frees rows past their term that have no pin. Returns their keys."""
        now = self._clock()
        past = [k for k, mark in self._marks.items() if mark.expires_s <= now]
        gone = [key for key in past if key not in self._pins]
        for key in gone:
            self._evict(key)
        return gone

    def _sweep_now_and_then(self) -> list[bytes]:
        now = self._clock()
        if now < self._next_sweep_s:
            return []
        self._next_sweep_s = now + SWEEP_S
        return self.expire()

    def _evict_oldest(self, victims: Collection[bytes]) -> None:
        for key in victims:
            self.lost_used_s = max(self.lost_used_s, self._marks[key].used_s)
            self._evict(key)

    def _evict(self, key: bytes) -> None:
        self._forget(key)
        self._counts[Count.EVICTED] += 1

    def _forget(self, key: bytes) -> None:
        row, tenant = self._ready.pop(key), self._marks.pop(key).tenant
        self._tenants.add(tenant, -1)
        self._tenants.note_end(tenant, key)
        layout.clear_mark(self._buffer, row)
        heapq.heappush(self._free, row)
        self._counts[Count.READY] = len(self._ready)

    def shrink_to_limit(self) -> list[bytes]:
        """Erases what the owner has ordered to, and drops what a changed cap no longer permits.
        Then gives back what its limit no longer permits: expired rows go first, then the least
        recently used; those that stay move out of the tail.
        Pinned and reserved rows stay where they are, so that a later call may have to finish.
        Returns the keys that left."""
        slab, erasure = self.slab, self.slab.file.erasure
        gone: list[bytes] = []
        if (removal := erasure.removal) is not None:
            self._removed[removal.tenant] = removal
            self.before_erasure(removal)
            gone = self.erase_tenant(removal)
            if not self._has_any(removal):
                erasure.finish()
        if self._caps_changed:
            gone += self._shrink_to_caps()
        slab.keep_to_limit()
        if slab.permitted_bytes >= slab.allocated_bytes:
            return gone
        gone += self.expire()
        room = slab.permitted_bytes // slab.geometry.row_bytes
        over = len(self._ready) + len(self._reserved) + len(self._forgotten) - room
        idle = (key for key in self._ready if key not in self._pins)
        victims = [key for key, _ in zip(idle, range(max(0, over)), strict=False)]
        self._evict_oldest(victims)
        self._cut_to(self._end_of_fixed(room), slab.permitted_bytes)
        return gone + victims

    def _has_any(self, removal: Removal) -> bool:
        if not self._tenants.held(removal.tenant):
            return False
        is_ready = any(removal.covers(m.tenant, m.asked_s) for m in self._marks.values())
        return is_ready or any(removal.covers(*claim) for claim in self._claims.values())

    def erase_tenant(self, removal: Removal) -> list[bytes]:
        """Overwrites rows of a removed tenant, so many at a time. Pinned and reserved rows stay for
        a later call. Returns the keys that left."""
        idle = (key for key in self._ready if key not in self._pins)
        marks = ((key, self._marks[key]) for key in idle)
        own = (key for key, mark in marks if removal.covers(mark.tenant, mark.asked_s))
        gone = [key for key, _ in zip(own, range(ERASED_AT_ONCE), strict=False)]
        nothing = bytes(self.slab.geometry.row_bytes)
        for key in gone:
            row = self._ready[key]
            self._forget(key)
            self.slab.row(row)[:] = nothing
        return gone

    def _end_of_fixed(self, room: int) -> int:
        """Returns how many rows stay usable: those permitted, and all up to the last that cannot
        move."""
        pinned = (self._ready[key] for key in self._pins)
        fixed = [*self._reserved.values(), *self._forgotten, *pinned]
        return max(room, max(fixed, default=-1) + 1)

    def _cut_to(self, count: int, least_bytes: Bytes) -> None:
        """Moves rows at and behind `count` to free places before it, and gives their pages back,
        but for the first `least_bytes`."""
        slab = self.slab
        places = sorted(row for row in self._free if row < count)
        behind = [key for key, row in self._ready.items() if row >= count]
        for key, place in zip(behind, places, strict=False):
            self._move(key, place)
        extent = slab.extent_bytes
        end = max([count, *(row + 1 for row in self._ready.values())], default=0)
        needed = -(-end * slab.geometry.row_bytes // extent) * extent
        allocated = max(least_bytes, needed)
        slab.cut(Bytes(min(allocated, slab.allocated_bytes)))
        self._known_count = self._usable_count
        taken = {*self._ready.values(), *self._reserved.values(), *self._forgotten}
        self._free = [row for row in range(self._known_count) if row not in taken]

    def _move(self, key: bytes, place: int) -> None:
        """Copies the bytes, then marks the copy, then frees the old: a kill between leaves the same
        row twice."""
        old = self._ready[key]
        self.slab.row(place)[:] = self.slab.row(old)
        layout.write_mark(self._buffer, place, self._marks[key])
        self._ready[key] = place
        layout.clear_mark(self._buffer, old)
