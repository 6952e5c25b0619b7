"""What a replica's process imports while somebody waits for its first answer."""

import subprocess
import sys

STARTS = (
    "import deployments.worker_start, deployments.capabilities.text, arbiter.server.actor, gc, sys"
)


def test_starting_replica_imports_neither_the_core_nor_store_nor_aiohttp() -> None:
    """arbiter.server.actor is imported by whoever gets a handle of the arbiter."""
    said = subprocess.run(
        [sys.executable, "-c", f"{STARTS}; print(gc.isenabled(), *sys.modules)"],
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout.split()  # fmt: skip
    collects, *imported = said
    assert collects == "True"
    assert "ray.serve._private.replica" in imported
    assert not {"arbiter.core.arbiter", "arbiter.server.store", "aiohttp"} & set(imported)
