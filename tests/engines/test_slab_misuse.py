"""Rows that an engine uses out of turn: each is a typed error in its process, which goes on."""

import os

import pytest

from arbiter.pool import Rows, Slab
from arbiter.units import MIB, Content
from tests.support.engine_host import ZygoteUnderTest, is_gone, served, until
from tests.support.misusing_engine import FREED, HELD, KEPT
from tests.support.slabs import NAMESPACE, ROW, TERM_S, Clock, has_its_bytes, lent_slab, path_of

EXPECTED = {
    "free twice": ("RowMisused", "freed, and it is not READY"),
    "use what is freed": ("RowMisused", "pinned, and it is not READY"),
    "unpin below zero": ("RowMisused", "unpinned, and it has no pin"),
    "free what is pinned": ("RowMisused", "freed, and it has 1 pins"),
    "mark what is freed": ("RowMisused", "marked READY, and it is not reserved"),
    "pull an extent away": ("PermissionError", "Operation not permitted"),
}


@pytest.mark.spec("E3")
def test_each_misuse_of_a_row_is_a_typed_error_and_the_engine_and_its_rows_go_on(
    engines: ZygoteUnderTest,
) -> None:
    with lent_slab(64 * MIB) as fd:
        config = {"slabs": {Content.KV: {"path": path_of(fd)}}}
        entry = "tests.support.misusing_engine:build"
        with served(engines, f"misuse-{os.getpid()}", entry, config) as child:
            for _ in range(2):  # the first changed nothing
                status, raised = child.call("GET", "/")
                assert status == 200
                assert raised.keys() == EXPECTED.keys()
                for misuse, (kind, cause) in EXPECTED.items():
                    assert raised[misuse][:1] == [kind], misuse
                    assert cause in raised[misuse][1]
        until(lambda: is_gone(child.pid), 10)
        rows = Rows(Slab(fd, Content.KV, NAMESPACE, ROW), TERM_S, Clock())
        assert has_its_bytes(rows, KEPT)
        assert rows.lookup(FREED) is None
        rows.drop(HELD)  # its pin has ended with the engine
        rows.slab.close()
