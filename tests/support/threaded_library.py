"""Stands in for a library that starts a thread at its import, and perhaps loads another library."""

import ctypes
import os
import threading

from deployments.engines import linux

if needed := os.environ.get("ARBITER_LOADS"):
    ctypes.CDLL(needed)
_named = threading.Event()


def _live() -> None:
    linux.set_name(os.environ.get("ARBITER_THREAD", "library_thread"))
    _named.set()
    threading.Event().wait()


threading.Thread(target=_live, daemon=True).start()
_named.wait()
