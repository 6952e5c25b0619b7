"""Rows of several tenants in one slab, against a plain dict: no tenant ever has more than its cap
allows, none loses a row to the cap of another, and what was ordered to be erased is gone."""

import contextlib
import itertools
from functools import partial

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from arbiter.pool import Removal, Rows, SlabView, layout
from tests.support.examples import examples
from tests.support.slabs import EXTENT, ROW, TERM_S, set_limit, slab_file, writer

TENANTS = [layout.tenant_digest(name) for name in ("default", "acme", "other")]
CAPS = {TENANTS[1]: 0.25, TENANTS[2]: 0.5}
KEYS = [f"key {number}".encode() for number in range(24)]
MOST = 3  # extents of four rows each


class SlabTenants(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.open = contextlib.ExitStack()
        self.fd = self.open.enter_context(slab_file(extents=MOST))
        self.owner = self.open.enter_context(contextlib.closing(SlabView(self.fd)))
        self.limit = MOST
        # Key: tenant, of rows that are READY, the least recently used first.
        self.kept: dict[bytes, bytes] = {}
        self.caps = CAPS
        self.clock = partial(next, itertools.count(1_000_000.0, 0.001))
        self.reopen()

    def teardown(self) -> None:
        self.open.close()

    @rule()
    def reopen(self) -> None:
        slab = writer(self.fd)
        self.open.callback(slab.close)
        self.rows = Rows(slab, TERM_S, self.clock, caps=self.caps)

    @rule(
        tenant=st.sampled_from(TENANTS),
        keys=st.lists(st.sampled_from(KEYS), unique=True, max_size=8),
        fails=st.booleans(),
    )
    def store(self, tenant: bytes, keys: list[bytes], fails: bool) -> None:
        count = self.limit * EXTENT // ROW
        had = sum(owner == tenant for owner in self.kept.values())
        reserved = self.rows.reserve(keys, tenant=tenant)
        self.note_use(keys[::-1])
        for each in TENANTS:
            own = [key for key, owner in self.kept.items() if owner == each and key not in keys]
            gone = [key for key in reserved.evicted if self.kept[key] == each]
            assert gone == own[: len(gone)], "the least recently used of each tenant leave first"
        for key in reserved.evicted:
            del self.kept[key]
        for key in reserved.rows:
            if fails:
                self.rows.abandon(key)
            else:
                self.rows.mark_ready(key, tenant)
                self.kept[key] = tenant
        has = sum(owner == tenant for owner in self.kept.values())
        assert has <= max(had, int(self.caps.get(tenant, 1.0) * count))

    def note_use(self, keys: list[bytes]) -> None:
        for key in keys:
            if key in self.kept:
                self.kept[key] = self.kept.pop(key)

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True, max_size=4))
    def use(self, keys: list[bytes]) -> None:
        self.rows.touch(keys)
        self.note_use(keys)

    @rule(caps=st.dictionaries(st.sampled_from(TENANTS), st.sampled_from([0.25, 0.5, 0.75])))
    def cap(self, caps: dict[bytes, float]) -> None:
        self.caps = caps
        self.rows.set_caps(caps)
        for key in self.rows.shrink_to_limit():
            del self.kept[key]
        for tenant, cap in caps.items():
            has = sum(owner == tenant for owner in self.kept.values())
            assert has <= int(cap * (self.limit * EXTENT // ROW))

    @precondition(lambda self: self.kept)
    @rule(dice=st.integers(0, 99))
    def drop(self, dice: int) -> None:
        key = sorted(self.kept)[dice % len(self.kept)]
        self.rows.drop(key)
        del self.kept[key]

    @rule(extents=st.integers(1, MOST))
    def limit_to(self, extents: int) -> None:
        self.limit = extents
        set_limit(self.fd, extents)
        for key in self.rows.shrink_to_limit():
            del self.kept[key]

    @rule(tenant=st.sampled_from(TENANTS), is_idle=st.booleans())
    def erase(self, tenant: bytes, is_idle: bool) -> None:
        if is_idle:
            self.owner.erase_tenant(Removal(tenant))
            self.kept = {k: owner for k, owner in self.kept.items() if owner != tenant}
            return self.reopen()
        assert self.owner.order_erasure(Removal(tenant))
        for key in self.rows.shrink_to_limit():
            del self.kept[key]
        assert not self.owner.must_erase
        assert tenant not in self.kept.values()

    @invariant()
    def the_table_says_whose_rows_are_there(self) -> None:
        assert {mark.key: mark.tenant for _, mark in self.owner.marks()} == self.kept
        assert len(self.rows) == len(self.kept)


TestSlabTenants = SlabTenants.TestCase
TestSlabTenants.settings = settings(
    max_examples=examples(100), stateful_step_count=30, derandomize=True
)
