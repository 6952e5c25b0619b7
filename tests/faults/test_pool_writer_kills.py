"""A writer that is killed at any moment leaves only whole rows (E5)."""

import os
import random
from functools import partial

import pytest

from arbiter.pool import Rows
from tests.support.slabs import (
    Clock,
    content_of,
    rows_of,
    run_and_kill,
    set_limit,
    slab_file,
    writer,
)

KILLS = 60
KEYS = 24  # more than the slab has rows: it evicts all the time


def write_for_ever(fd: int, clock: Clock, seed: int, ready: int) -> None:
    """Stores, drops and moves rows until it is killed."""
    dice = random.Random(seed)
    rows = Rows(writer(fd), 1e6, clock)
    os.write(ready, b".")
    while True:
        keys = [f"k{number}".encode() for number in dice.sample(range(KEYS), 3)]
        for key, row in rows.reserve(keys).rows.items():
            rows.slab.row(row)[:] = content_of(key)
            rows.mark_ready(key)
        set_limit(fd, dice.randrange(1, 5))
        rows.shrink_to_limit()


@pytest.mark.spec("E5")
def test_row_that_is_ready_after_a_kill_at_any_moment_has_the_bytes_of_its_key() -> None:
    clock, found = Clock(), 0
    with slab_file(extents=4) as fd:
        for seed in range(KILLS):
            # Within the first milliseconds of its work, in which it stores some hundred rows.
            run_and_kill(partial(write_for_ever, fd, clock, seed), seed, 8_000_000)
            with rows_of(fd, clock) as rows:
                marks = list(rows.slab.marks())
                assert len({mark.key for _, mark in marks}) == len(marks) == len(rows)
                for row, mark in marks:
                    assert bytes(rows.slab.row(row)) == content_of(mark.key)
                used = rows.slab.geometry.table_end + rows.slab.allocated_bytes
                assert os.fstat(fd).st_blocks * 512 == used
                found += len(marks)
    assert found > KILLS, "the writers were killed before they stored anything"
