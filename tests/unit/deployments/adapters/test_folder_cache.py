"""Clean-ups of the adapter store run one after the other."""

import os
import threading
from pathlib import Path

import pytest

from deployments.adapters import folder_cache
from tests.support.engine_host import until, waits_for_a_lock


@pytest.mark.spec("F2")
def test_concurrent_cleanups_of_the_store_run_one_after_the_other(tmp_path: Path) -> None:
    """Each sees the store as the other left it; a lock of a file, so processes too."""
    entered = threading.Event()

    def enter() -> None:
        with folder_cache.alone(tmp_path):
            entered.set()

    other = threading.Thread(target=enter)
    with folder_cache.alone(tmp_path):
        other.start()
        until(lambda: waits_for_a_lock(os.getpid()) or entered.is_set(), 10)
        assert not entered.is_set()
    other.join(60)
    assert entered.is_set()
