"""The arbiter from outside: find, start, ask, replace and stop it.

Functions that wait for an answer and are not `async` raise GetTimeoutError where none comes in
time, ActorUnavailableError where the arbiter restarts for longer than that, and what the arbiter
answered with.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)

from arbiter.errors import ActorAbsent, ArbiterUnavailable, RequestError
from arbiter.protocol import messages, ray_internals

POLL_S = 15.0  # of the event stream, which then asks again
CALL_S = 30.0  # twice the longest poll of the event stream
START_S = 60.0  # a process start on a machine busy with imports
CLOSE_S = 10.0  # of a node agent, as arbiter.server.node_agents has it
AGAIN_S = 0.05  # a restart takes 1.0-2.0 s measured
KILLED_S = 0.005  # between two looks whether an actor that was killed is dead, which takes 3 ms
# Ray gives an actor with a runtime environment, and the actors that it starts, a process of its
# own. Without one it may give them a spare worker, which has imported the code that is replaced.
NEW_PROCESS = {"env_vars": {"ARBITER_REPLACES": "1"}}


def find_arbiter() -> Any | None:
    """Returns the handle of the arbiter's actor, or None when there is no arbiter."""
    return find_actor(messages.NAME)


def arbiter_handle() -> Any:
    """Returns the handle of the arbiter's actor. Raises ActorAbsent."""
    return actor_handle(messages.NAME)


async def start_arbiter(boot: messages.StartConfig) -> Any:
    """Returns the handle of the one arbiter, and starts it when there is none. An arbiter of other
    code is replaced if it has no holders, else raises VersionMismatch. Raises GetTimeoutError,
    ActorUnavailableError where the arbiter that is there does not answer."""
    return await asyncio.to_thread(_start_or_replace, boot)


async def call_arbiter(method: str, *args: Any, within_s: float = CALL_S) -> Any:
    """Calls one of the actor's methods, for the front and the command line; waits while it
    restarts. Raises ArbiterUnavailable, or the RequestError the arbiter answered with."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(within_s):
            return await _call(method, args)
    except RayTaskError as error:  # a bug over there is raised as it is
        raise ray_internals.raised_there(error, RequestError) or error from None
    except (RayError, TimeoutError, ActorAbsent) as error:
        raise ArbiterUnavailable(time.monotonic() - began) from error


async def subscribe(after: int = 0) -> AsyncIterator[messages.Plain]:
    """Yields the events after sequence number `after` as they happen, until the caller stops.
    Raises ArbiterUnavailable."""
    while True:
        for event in await call_arbiter("events", after, POLL_S):
            after = event["seq"]
            yield event


async def _call(method: str, args: tuple[Any, ...]) -> Any:
    """Sends a call, and sends it again when it may not have arrived. Every method may be repeated;
    only `unregister` then raises UnknownCapability if the first call was carried out. Raises
    ActorAbsent."""
    while True:
        handle = await asyncio.to_thread(arbiter_handle)
        try:
            return await getattr(handle, method).remote(*args)
        except ActorUnavailableError:
            await asyncio.sleep(AGAIN_S)


def upgrade_arbiter(boot_of: Callable[[messages.Plain], messages.StartConfig]) -> messages.Plain:
    """Replaces arbiter and node agents by this code. Engines and zygotes go on; holders rejoin. Of
    the old one only its table is taken over, in plain values; `boot_of` reads it, and nothing has
    happened yet if it cannot. From an arbiter that hangs the table is taken out of its state file;
    raises GetTimeoutError where that is not to be had."""
    old = find_arbiter()
    if old is None:
        return {"arbiter": "there is none; it starts with the front"}
    try:
        before = _settled(old.hello.remote, START_S)
        table = _settled(old.table.remote, START_S)
    except GetTimeoutError as error:
        before = {"identity": f"did not answer for {START_S:g} s", "holders": "not known"}
        table = _kept_table(error)
    boot = boot_of(table)
    after = _settled(_replace(boot).hello.remote, START_S)
    return {
        "before": before["identity"],
        "after": after["identity"],
        "holders": before["holders"],
        "epoch": after["epoch"],
    }


def _kept_table(error: GetTimeoutError) -> messages.Plain:
    """Returns the table of an arbiter that hangs, from the state file. Raises GetTimeoutError where
    there is none."""
    from arbiter.server.state_path import default_path
    from arbiter.server.store import kept_table

    file = ray_internals.noted_state_file() or default_path()
    table = kept_table(file, ray_internals.session_name())
    if table is None:
        raise GetTimeoutError(
            f"it did not answer for {START_S:g} s, and {file} has no table of this cluster that"
            " this version reads. End it by `arbiter down`, and restart the front, which starts"
            " another"
        ) from error
    return table


def record_arbiter(path: str | None) -> messages.Plain:
    """Has every event recorded into a file on the arbiter's node, from a new epoch on; None ends
    it, which begins a new epoch too, unless nothing is recorded. Raises ArbiterUnavailable when
    there is no arbiter."""
    handle = find_arbiter()
    if handle is None:
        raise ArbiterUnavailable(0.0)
    before = _settled(handle.hello.remote, START_S)["epoch"]
    _settled(lambda: handle.record.remote(path, before), START_S)
    return {"recording": path or "no longer"}


def stop_arbiter(wait_s: float = 30.0) -> messages.Plain:
    """Shuts the arbiter down: it unloads what is idle, waits for the rest, and ends every engine,
    agent and zygote. An arbiter that does not answer is killed, and its agents end what they
    have."""
    handle = find_arbiter()
    if handle is None:
        return {"arbiter": "there is none", "tickets_cut_off": 0}
    within_s = wait_s + START_S
    try:
        open_tickets = _settled(lambda: handle.close.remote(wait_s), within_s)
    except GetTimeoutError:
        _kill(handle)  # first, because it would start its agents again
        for agent in _agents():
            with contextlib.suppress(RayError):
                ray.get(agent.close.remote(), timeout=CLOSE_S)
            _kill(agent)
        return {"arbiter": f"killed with its node agents: no answer for {within_s:g} s"}
    _kill(handle)
    return {"arbiter": "stopped", "tickets_cut_off": open_tickets}


def _settled(send: Callable[[], Any], within_s: float) -> Any:
    """Returns the answer of an arbiter that may be restarting. Raises ActorUnavailableError when it
    still restarts after `within_s`, GetTimeoutError when a call has no answer by then."""
    end = time.monotonic() + within_s
    while True:
        try:
            return ray.get(send(), timeout=within_s)
        except ActorUnavailableError:
            if time.monotonic() > end:
                raise
            time.sleep(AGAIN_S)


def _start_or_replace(boot: messages.StartConfig) -> Any:
    handle = _start(boot)
    greeting = _settled(handle.hello.remote, START_S)
    if greeting["identity"] == messages.identity():
        return handle
    if greeting["holders"]:
        raise messages.VersionMismatch(
            greeting["identity"], messages.identity(), greeting["holders"]
        )
    return _replace(boot)


def _replace(boot: messages.StartConfig) -> Any:
    _kill(find_arbiter())
    for running in _agents():
        _kill(running)
    agent = replace(boot.agent, spares_since_unix_s=time.time())
    return _start(replace(boot, agent=agent), runtime_env=NEW_PROCESS)


def _agents() -> Iterator[Any]:
    for node in ray_internals.living_nodes():
        if (handle := find_actor(messages.agent_name(node))) is not None:
            yield handle


def _start(boot: messages.StartConfig, **more: Any) -> Any:
    """Returns the handle of the arbiter, started if there is none. `more`: options of the actor, if
    it starts."""
    from arbiter.server.actor import ArbiterActor  # the core is nothing to a replica that only asks

    waiting_count = boot.configuration.settings.queue_total_count
    options = ray_internals.detached(
        ray_internals.head_node(), messages.NAME, messages.NAMESPACE, waiting_count
    )
    return ray.remote(ArbiterActor).options(**options, **more).remote(boot)


def find_actor(name: str) -> Any | None:
    try:
        return ray.get_actor(name, namespace=messages.NAMESPACE)
    except ValueError:
        return None


def actor_handle(name: str) -> Any:
    """Returns the handle of one of our actors. Raises ActorAbsent."""
    handle = find_actor(name)
    if handle is None:
        raise ActorAbsent(name)
    return handle


def _kill(handle: Any | None) -> None:
    """Kills an actor, and waits until its name is free, for START_S at most. It answers for some
    milliseconds more, and is called unavailable while Ray does not know yet that it is dead."""
    if handle is None:
        return
    ray.kill(handle, no_restart=True)
    end = time.monotonic() + START_S
    while (left_s := end - time.monotonic()) > 0:
        try:
            ray.get(handle.__ray_ready__.remote(), timeout=left_s)
        except ActorUnavailableError:
            pass
        except (RayActorError, GetTimeoutError):
            return
        time.sleep(KILLED_S)
