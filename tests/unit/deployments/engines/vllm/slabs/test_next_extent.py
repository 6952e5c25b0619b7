"""Extents that are allocated beside the engine's steps: when they are, and that they go again."""

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from arbiter.pool import Rows, Slab
from arbiter.units import Bytes
from deployments.engines.vllm.slabs import next_extent
from deployments.engines.vllm.slabs.next_extent import SOON_S, NextExtent
from tests.support.slabs import EXTENT, TERM_S, Clock, set_limit, slab_file, writer
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
        Rows(slab, TERM_S, Clock()).shrink_to_limit()
        assert blocks(fd) == table + 2 * EXTENT
        set_limit(fd, 4)
        assert slab.grow() and slab.grow() and blocks(fd) == table + 4 * EXTENT
    with contextlib.closing(grown()) as slab:
        slab.cut(EXTENT)
        assert blocks(fd) == table + EXTENT
        assert slab.grow() and not any(slab.row(slab.usable_count - 1)), "pages anew"
    grown().close()
    assert blocks(fd) == table + 2 * EXTENT


@pytest.mark.spec("E5")
def test_pages_allocated_ahead_by_a_killed_engine_are_given_back_to_the_next(fd: int) -> None:
    killed = writer(fd)
    killed.ahead = NextExtent(killed.file.fd, Clock())
    assert killed.grow() and killed.grow()
    wait_in_thread(lambda: blocks(fd) == killed.geometry.table_end + 3 * EXTENT)
    killed.file.close()
    with contextlib.closing(writer(fd)) as slab:
        assert slab.allocated_bytes == 2 * EXTENT and blocks(fd) == slab.file.allocated_bytes
        assert blocks(fd) == slab.geometry.table_end + 2 * EXTENT


@pytest.mark.spec("E1")
def test_writer_allocates_by_itself_where_nothing_could_be_allocated_ahead(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(writer(fd)) as slab:
        slab.ahead = ahead = NextExtent(slab.file.fd, Clock())
        assert slab.grow()
        with monkeypatch.context() as short:
            short.setattr(next_extent.threading, "Thread", no_thread)
            assert slab.grow() and ahead.end == 0
        assert slab.grow() and blocks(fd) >= slab.geometry.table_end + 3 * EXTENT
        slab.cut(Bytes(0))
        assert slab.grow()
        monkeypatch.setattr(ahead, "_allocate", lambda: None)  # as where memory is short
        assert slab.grow() and ahead.end and slab.grow()
        assert blocks(fd) == slab.geometry.table_end + 3 * EXTENT


def no_thread(**_: object) -> SimpleNamespace:
    def start() -> None:
        raise RuntimeError("can't start new thread")

    return SimpleNamespace(start=start)
