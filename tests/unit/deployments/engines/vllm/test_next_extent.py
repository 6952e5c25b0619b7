"""Extents that are allocated beside the engine's steps: when they are, and that they go again."""

import contextlib
import os
from collections.abc import Iterator

import pytest

from arbiter.pool import Slab
from arbiter.units import Bytes
from deployments.engines.vllm.next_extent import SOON_S, NextExtent
from tests.support.slabs import EXTENT, Clock, set_limit, slab_file, writer
from tests.support.waits import wait_in_thread


@pytest.fixture
def fd() -> Iterator[int]:
    with slab_file() as made:
        yield made


def blocks(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


@pytest.mark.spec("E1")
def test_next_extent_is_allocated_ahead_once_extents_follow_each_other_soon(fd: int) -> None:
    clock = Clock()
    with contextlib.closing(writer(fd)) as slab:
        slab.ahead = NextExtent(slab.file.fd, clock)
        table = slab.geometry.table_end

        def extents() -> tuple[int, int]:
            """In use, and with pages."""
            return slab.allocated_bytes // EXTENT, (blocks(fd) - table) // EXTENT

        assert slab.grow() and extents() == (1, 1)
        clock.now_s += 2 * SOON_S
        assert slab.grow() and extents() == (2, 2)
        assert slab.grow()
        wait_in_thread(lambda: extents() == (3, 4))  # the next one has its pages
        assert slab.grow() and extents() == (4, 4), "it is within the limit, and no other is"
        assert not slab.grow()


@pytest.mark.spec("E1", "E3")
def test_what_was_allocated_ahead_goes_with_the_limit_a_cut_and_the_writer(fd: int) -> None:
    def grown() -> Slab:
        slab = writer(fd)
        slab.ahead = NextExtent(slab.file.fd, Clock())
        slab.cut(Bytes(0))
        assert slab.grow() and slab.grow()
        return slab

    with contextlib.closing(grown()) as slab:
        table = slab.geometry.table_end
        set_limit(fd, 2)
        slab.keep_to_limit()
        assert blocks(fd) == table + 2 * EXTENT
        set_limit(fd, 4)
        assert slab.grow() and slab.grow() and blocks(fd) == table + 4 * EXTENT
    with contextlib.closing(grown()) as slab:
        slab.cut(EXTENT)
        assert blocks(fd) == table + EXTENT
        assert slab.grow() and not any(slab.row(slab.usable_count - 1)), "pages anew"
    grown().close()
    assert blocks(fd) == table + 2 * EXTENT
