"""What the arbiter's process imports when it starts in a cluster without Serve."""

import subprocess
import sys

SERVER = (
    "import importlib, pkgutil, sys, arbiter.server as server\n"
    "for module in pkgutil.iter_modules(server.__path__, 'arbiter.server.'):\n"
    "    importlib.import_module(module.name)\n"
    "print(*sys.modules)"
)


def test_the_arbiter_imports_neither_serve_nor_what_checks_bodies() -> None:
    imported = subprocess.run(
        [sys.executable, "-c", SERVER], capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    assert "arbiter.server.lease_service" in imported
    assert not {"pydantic", "ray.serve", "numpy", "aiohttp", "httpx"} & set(imported)
