"""An upgrade from one version to another on a cluster of its own (A20). Run by test_version_upgrade
in a copy of the repository, whose code it changes as a new release would. Prints `ok`.

    python -m tests.faults.version_upgrade            # the cluster, and what happens to it
    python -m tests.faults.version_upgrade ADDRESS    # a driver: starts the arbiter if it may
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from arbiter.client.admin import call_arbiter, start_arbiter
from arbiter.client.holder import UNREACHABLE_S
from arbiter.errors import ArbiterUnavailable
from arbiter.protocol import messages
from deployments.config import boot
from tests.conftest import ENVIRONMENT
from tests.support.holder import Holder
from tests.support.live_arbiter import LiveArbiter, capability, live_arbiter, model

CODE = Path(messages.__file__)
OLD = "class ReloadCommand:\n    model: str\n"
NEW = OLD + "    is_new: bool = True\n"  # a field more is another protocol
SOON_S = 60.0  # for the start of a process with Ray


async def main(address: str) -> None:
    async with live_arbiter({"chat": capability(a=model(50), b=model(60))}) as d:
        old = d.holder()
        assert await old.ask.remote("a") == 200
        engines, identity = await d.engines(), messages.identity()
        replace_code()
        refused = await ran("tests.faults.version_upgrade", address)
        assert "VersionMismatch" in refused and "1 holders" in refused, refused
        assert (await hello())["identity"] == identity and await d.engines() == engines
        report = json.loads(await ran("deployments.cli", "upgrade", "--address", address, "--json"))
        assert report["before"] == identity != report["after"], report
        assert report["holders"] == 1, report
        assert (await hello())["identity"] == report["after"]
        await old_holder_serves_what_it_has(d, old, engines)
        await new_holders_are_served(d, address, report["after"])
        ray.kill(d.holders.pop())
        await d.until(lambda s: not s["tickets"] and not s["holders"])
        await d.books_are_true()
        print("ok")


def replace_code() -> None:
    assert CODE.is_relative_to(Path.cwd()) and not Path(".git").exists(), "this is no copy"
    text = CODE.read_text()
    assert text.count(OLD) == 1
    CODE.write_text(text.replace(OLD, NEW))


async def hello() -> Any:
    return await call_arbiter("hello")


async def old_holder_serves_what_it_has(d: LiveArbiter, old: Any, engines: Any) -> None:
    """And nothing else: it cannot join, so it has no ticket of the new arbiter."""
    assert await old.ask.remote("a") == 200
    await old.wait_for_an_arbiter.remote(UNREACHABLE_S)
    with pytest.raises(ArbiterUnavailable):
        await old.ask.remote("b")
    state = await d.until(lambda s: s["devices"])
    assert state["holders"] == state["tickets"] == [] and await d.engines() == engines


async def new_holders_are_served(d: LiveArbiter, address: str, identity: str) -> None:
    """Drivers of the new code; and workers, none of which has imported the old code before."""
    said = await ran("tests.faults.version_upgrade", address, "hold")
    assert said.split() == ["200", identity], said


async def ran(module: str, *arguments: str) -> str:
    """What a new process prints and complains of."""
    command = [sys.executable, "-m", module, *arguments]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=SOON_S, check=False
    )
    return str(done.stdout or done.stderr)


async def hold() -> None:
    """An actor of this code has a model."""
    holder = Holder.remote("chat")  # type: ignore[attr-defined]
    answer = await holder.ask.remote("b")
    identity = await holder.__ray_call__.remote(lambda _: messages.identity())
    print(answer, identity)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        os.environ.update(ENVIRONMENT)
        made = ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        asyncio.run(main(made.address_info["gcs_address"]))
    else:
        ray.init(sys.argv[1], log_to_driver=False)
        table = {"capabilities": {"chat": capability(a=model(50))}}
        asyncio.run(hold() if len(sys.argv) > 2 else start_arbiter(boot.read(table)))
