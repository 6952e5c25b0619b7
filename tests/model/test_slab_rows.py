"""The rows of a slab against a plain dict: whatever is stored, pinned, dropped, expired, shrunk and
reopened, what is found has the bytes of its key, what was neither evicted nor dropped is found, and
the file holds no more than its limit permits."""

import contextlib
import os

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from arbiter.pool import Rows, Term
from arbiter.pool.layout import TERMS_S
from tests.support.examples import examples
from tests.support.slabs import (
    EXTENT,
    ROW,
    TERM_S,
    Clock,
    content_of,
    has_its_bytes,
    set_limit,
    slab_file,
    writer,
)

KEYS = [f"key {number}".encode() for number in range(16)]
MOST = 3  # extents of four rows each
SPANS_S = {**TERMS_S, Term.LONG: TERM_S}
TERMS = st.sampled_from(Term)


class SlabRows(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.open = contextlib.ExitStack()
        self.fd = self.open.enter_context(slab_file(extents=MOST))
        self.clock, self.limit = Clock(), MOST
        self.expires: dict[bytes, float] = {}  # the keys that must be found, each until then
        self.terms: dict[bytes, Term] = {}  # of the use with which a key expires
        self.reserved: dict[bytes, int] = {}
        self.pins: dict[bytes, int] = {}
        self.reopen()

    def reopen(self) -> None:
        slab = writer(self.fd)
        self.open.callback(slab.close)
        self.rows = Rows(slab, TERM_S, self.clock)

    def teardown(self) -> None:
        self.open.close()

    def forget(self, keys: list[bytes]) -> None:
        for key in keys:
            del self.expires[key]

    def use(self, key: bytes, term: Term) -> None:
        """A key expires with the latest of its uses."""
        end_s = self.clock() + SPANS_S[term]
        self.expires[key] = max(self.expires.get(key, 0.0), end_s)
        if self.expires[key] == end_s:
            self.terms[key] = term

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True, max_size=6), term=TERMS)
    def reserve(self, keys: list[bytes], term: Term) -> None:
        got = self.rows.reserve(keys, term=term)
        assert not set(got.evicted) & (set(self.pins) | set(self.reserved))
        assert not set(got.evicted) & set(keys)
        self.forget(got.evicted)
        for key in keys:
            if key in self.expires:
                self.use(key, term)
        new = [k for k in keys if k not in self.expires and k not in self.reserved]
        assert list(got.rows) == new[: len(got.rows)]
        busy = len(self.pins) + len(self.reserved) + len(keys)
        assert len(got.rows) == len(new) or busy > self.limit * EXTENT // ROW - len(new)
        for key, row in got.rows.items():
            assert row not in self.reserved.values()
            self.rows.slab.row(row)[:] = content_of(key)
        self.reserved |= got.rows

    @precondition(lambda self: self.reserved)
    @rule(dice=st.integers(0, 99), term=TERMS)
    def finish(self, dice: int, term: Term) -> None:
        key = sorted(self.reserved)[dice % len(self.reserved)]
        del self.reserved[key]
        if dice % 5 == 0:
            self.rows.abandon(key)
        else:
            self.rows.mark_ready(key, term=term)
            self.use(key, term)

    @rule(key=st.sampled_from(KEYS))
    def pin(self, key: bytes) -> None:
        if self.rows.lookup(key) is not None:
            self.rows.pin([key])
            self.pins[key] = self.pins.get(key, 0) + 1
        elif key not in self.pins:
            self.expires.pop(key, None)  # an expired row that a lookup meets is dropped

    @precondition(lambda self: self.pins)
    @rule(dice=st.integers(0, 99))
    def unpin(self, dice: int) -> None:
        key = sorted(self.pins)[dice % len(self.pins)]
        self.rows.unpin([key])
        self.pins[key] -= 1
        if not self.pins[key]:
            del self.pins[key]

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True, max_size=6), term=TERMS)
    def touch(self, keys: list[bytes], term: Term) -> None:
        self.rows.touch(keys, term)
        for key in keys:
            if key in self.expires:
                self.use(key, term)

    @rule(key=st.sampled_from(KEYS))
    def drop(self, key: bytes) -> None:
        if key in self.expires and key not in self.pins:
            self.rows.drop(key)
            del self.expires[key]

    @rule(span_s=st.sampled_from([1.0, TERM_S / 3, TERM_S * 2, TERMS_S[Term.SHORT]]))
    def let_time_pass(self, span_s: float) -> None:
        self.clock.now_s += span_s

    @rule()
    def expire(self) -> None:
        past = [k for k, at in self.expires.items() if at <= self.clock() and k not in self.pins]
        assert set(self.rows.expire()) == set(past)
        self.forget(past)

    @rule(extents=st.integers(0, MOST))
    def limit_to(self, extents: int) -> None:
        self.limit = extents
        set_limit(self.fd, extents)
        gone = self.rows.shrink_to_limit()
        assert not set(gone) & set(self.pins)
        self.forget(gone)
        if not self.pins and not self.reserved:
            assert self.rows.slab.allocated_bytes <= extents * EXTENT

    @rule()
    def kill_the_writer(self) -> None:
        """Its pins, and what it was writing, end with it."""
        self.pins, self.reserved = {}, {}
        self.expires = {k: at for k, at in self.expires.items() if at > self.clock()}
        self.reopen()
        assert len(self.rows) == len(self.expires)

    @invariant()
    def what_must_be_found_has_its_bytes_and_nothing_else_is_found(self) -> None:
        for key in KEYS:
            if key in self.expires and self.expires[key] > self.clock():
                assert has_its_bytes(self.rows, key)
        marked = {mark.key: mark for _, mark in self.rows.slab.marks()}
        assert {key: mark.expires_s for key, mark in marked.items()} == self.expires
        assert {key: mark.kind for key, mark in marked.items()} == {
            key: self.terms[key] for key in self.expires
        }
        assert len(self.rows) == len(self.expires)

    @invariant()
    def the_file_holds_what_the_slab_says(self) -> None:
        slab = self.rows.slab
        assert os.fstat(self.fd).st_blocks * 512 == slab.geometry.table_end + slab.allocated_bytes


TestSlabRows = SlabRows.TestCase
TestSlabRows.settings = settings(
    max_examples=examples(200), stateful_step_count=40, derandomize=True
)
