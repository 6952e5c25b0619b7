"""The cache of pictures in mixed traffic: however steps overlap with each other, with a purge, the
term, a smaller limit and a kill, a promised picture is loaded as its encoder made it, each use
counts once, and no more pictures stay than may."""

import contextlib
from collections import deque

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from arbiter.pool import layout
from arbiter.units import Bytes
from deployments.engines.vllm.pictures.picture_cache import TERM_S, Copies
from tests.support.examples import examples
from tests.support.picture_slabs import (
    CAPACITY,
    ROW,
    embeddings,
    opened,
    picture_slab_file,
    set_limit,
)
from tests.support.slabs import Clock

COUNTS = {f"p{number}": count for number, count in enumerate((10, 64, 65, 130, 16, 200))}
ENTRIES = 3
MOST_IN_FLIGHT = 3  # steps; of a GPU two are
ROWS = 12  # fewer than all pictures need, more than any of them


class Pictures(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.open = contextlib.ExitStack()
        self.fd = self.open.enter_context(picture_slab_file())
        self.clock = Clock()
        self.uses = 0
        self.limit_to(ROWS)
        self.start()

    def start(self) -> None:
        made = opened(self.fd, self.clock, entries=ENTRIES)
        self.engine = self.open.enter_context(made)
        self.in_flight: deque[Copies] = deque()

    def teardown(self) -> None:
        self.open.close()

    @precondition(lambda self: len(self.in_flight) < MOST_IN_FLIGHT)
    @rule(names=st.lists(st.sampled_from(sorted(COUNTS)), unique=True, min_size=1, max_size=3))
    def schedule(self, names: list[str]) -> None:
        """Of one count each, as a model with pictures of several sizes sends them."""
        self.in_flight.append(self.engine.schedule(*names, counts=COUNTS)[0])
        self.uses += len(names)

    @precondition(lambda self: len(self.in_flight) < MOST_IN_FLIGHT)
    @rule(
        preempted=st.sampled_from(sorted(COUNTS)),
        others=st.lists(st.sampled_from(sorted(COUNTS)), unique=True, max_size=2),
    )
    def preempt(self, preempted: str, others: list[str]) -> None:
        """A more urgent request takes the blocks of another whose picture is for the same step."""
        names = [preempted, *(name for name in others if name != preempted)]
        copies, _ = self.engine.schedule(*names, counts=COUNTS, unread={preempted})
        copied = {copy.picture.identity for copy in (*copies.loads, *copies.saves)}
        assert preempted not in copied
        self.in_flight.append(copies)
        self.uses += len(names)

    @rule(name=st.sampled_from(sorted(COUNTS)))
    def ask_in_vain(self, name: str) -> None:
        """The request found no blocks of KV."""
        self.engine.expect(name, counts=COUNTS)
        self.engine.cache.promise(name)
        assert self.engine.cache.end_step() == Copies()

    @precondition(lambda self: self.in_flight)
    @rule()
    def work(self) -> None:
        for name, loaded in self.engine.work(self.in_flight.popleft()).items():
            assert torch.equal(loaded, embeddings(name, COUNTS[name]))

    @rule(span_s=st.sampled_from([1.0, TERM_S / 2, TERM_S]))
    def let_time_pass(self, span_s: float) -> None:
        self.clock.now_s += span_s
        self.engine.cache.expire()

    @rule()
    def purge(self) -> None:
        self.engine.cache.purge()

    @rule(rows=st.integers(0, ROWS))
    def limit_to(self, rows: int) -> None:
        table = layout.geometry(CAPACITY, ROW).table_end
        set_limit(self.fd, Bytes(table + rows * ROW))

    @rule()
    def shrink(self) -> None:
        self.engine.cache.shrink()

    @rule()
    def kill(self) -> None:
        self.start()

    @invariant()
    def each_use_is_counted_once(self) -> None:
        assert sum(self.engine.counts) == self.uses

    @invariant()
    def nothing_is_held_between_steps(self) -> None:
        if not self.in_flight:
            rows = self.engine.cache.rows
            assert not rows._pins and not rows._reserved

    @invariant()
    def no_more_stay_than_may(self) -> None:
        if not self.in_flight:
            assert self.engine.cache.facts()["entries"] <= ENTRIES


TestPictures = pytest.mark.spec("H8", "E3")(Pictures.TestCase)
TestPictures.settings = settings(
    max_examples=examples(100), stateful_step_count=40, derandomize=True
)
