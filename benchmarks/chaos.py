"""Random kills under load, on a real cluster with real child processes: is a byte ever lost or
doubled, is any request left without an answer?

    python -m benchmarks.chaos --kills 200

Three holders ask for three models of which two fit. Each kill takes a random process of the
protocol: an engine, a holder, the arbiter, the node agent, the zygote, or several at once. The
figure is in the last lines.
"""

import argparse
import asyncio
import contextlib
import os
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import ray
from ray.exceptions import RayActorError, RayTaskError

from arbiter.errors import RequestError
from arbiter.units import MIB
from benchmarks import report
from benchmarks.tally import Tally, end
from tests.conftest import ENVIRONMENT
from tests.support.live_arbiter import LiveArbiter, NoAnswer, capability, live_arbiter, model

MODELS = {"a": 80, "b": 90, "c": 100}  # MiB; any two fit, three do not
BUDGET_MIB = 260
ANSWER_S = 60.0  # no request may take longer, whatever dies
LOOK_EVERY = 10  # kills between full comparisons of books and measurement
TARGETS = (
    "engine",
    "engine",
    "holder",
    "arbiter",
    "agent",
    "zygote",
    "arbiter+holder",
    "agent+zygote",
)


@dataclass
class Kills(Tally):
    rounds_without_victim: int = 0
    killed_s: list[tuple[float, str]] = field(default_factory=list)  # when, what

    def meanwhile(self, began_s: float) -> str:
        """What was killed since."""
        counts = Counter(what for when, what in self.killed_s if when >= began_s)
        return "meanwhile killed: " + ", ".join(f"{n} {what}" for what, n in counts.items())


class Load:
    """Requests without pause, each from a living holder; a dead one is replaced."""

    def __init__(self, d: LiveArbiter, tally: Kills, dice: random.Random) -> None:
        self.d, self.tally, self.dice = d, tally, dice
        self.holders = {name: d.holder(name) for name in MODELS}
        self.stopping = False

    async def run(self, name: str) -> None:
        while not self.stopping:
            began_s = time.monotonic()
            outcome = await self._ask(name)
            took_s = time.monotonic() - began_s
            self.tally.answered(name, outcome, took_s, self.tally.meanwhile(began_s))
            await asyncio.sleep(self.dice.random() * 0.1)

    async def _ask(self, name: str) -> str:
        """How one request ended, in a word."""
        holder = self.holders[name]
        try:
            status = await asyncio.wait_for(holder.ask.remote(name), ANSWER_S)
        except RayTaskError as error:
            if isinstance(error.cause, RequestError):
                return error.cause.code
            self.tally.untyped.append(repr(error.cause))
        except RayActorError:
            if self.holders[name] is holder:  # Serve would answer: sent again to another replica
                self.holders[name] = self.d.holder(name)
            return "holder_lost"
        except TimeoutError:
            self.tally.untyped.append(f"no answer in {ANSWER_S:.0f} s")
        else:
            return "served" if status == 200 else f"status_{status}"
        return "untyped"


async def victims(d: LiveArbiter, load: Load, target: str, dice: random.Random) -> list[int]:
    """Pids of a target, as far as they exist now."""
    pids: list[int] = []
    for part in target.split("+"):
        with contextlib.suppress(RequestError, RayActorError, RayTaskError, ValueError, IndexError):
            pids.append(await _pid(d, load, part, dice))
    return [pid for pid in pids if pid > 0]


async def _pid(d: LiveArbiter, load: Load, part: str, dice: random.Random) -> int:
    if part == "arbiter":
        return await d.arbiter_pid()
    if part == "engine":
        return dice.choice(sorted(pid for pids in (await d.engines()).values() for pid in pids))
    if part == "holder":
        holder = dice.choice(sorted(load.holders.items()))[1]
        return int(await asyncio.wait_for(holder.pid.remote(), ANSWER_S))
    return (await d.pids())[part]


async def look(d: LiveArbiter, tally: Kills) -> None:
    """With the load going on: books against measurement, until they agree once."""
    tally.looks += 1
    try:
        await d.books_are_true()
    except NoAnswer:
        tally.unanswered_looks += 1
    except AssertionError as wrong:
        tally.wrong.append(str(wrong))


async def chaos(kills: int, seed: int) -> Kills:
    dice, tally = random.Random(seed), Kills()
    table = {name: capability("text", **{name: model(mib)}) for name, mib in MODELS.items()}
    async with live_arbiter(table, mib=BUDGET_MIB, barrier_s=2.0) as d:
        load = Load(d, tally, dice)
        clients = [asyncio.ensure_future(load.run(name)) for name in MODELS for _ in range(2)]
        while (number := tally.kills_count) < kills:
            target = dice.choice(TARGETS)
            killed = end(await victims(d, load, target, dice))
            tally.processes += killed
            if killed:
                tally.killed_s.append((time.monotonic(), target))
            tally.rounds_without_victim += not killed
            await asyncio.sleep(dice.random() * 1.5)
            if not killed:
                continue  # it was dead already or could not be found: not a kill
            tally.kills[target] += 1
            if (number + 1) % LOOK_EVERY == 0:
                await look(d, tally)
                print(f"{number + 1} kills, {sum(tally.answers.values())} answers", flush=True)
        load.stopping = True
        await asyncio.gather(*clients)
        await settle(d, load, tally)
    return tally


async def settle(d: LiveArbiter, load: Load, tally: Kills) -> None:
    """Faults are over: everybody is served, and nothing is left that should not be."""
    for name in MODELS:
        end = time.monotonic() + ANSWER_S
        while (answer := await load._ask(name)) != "served":
            if time.monotonic() > end:
                tally.wrong.append(f"{name} is not served after the faults: {answer}")
                break
    await look(d, tally)
    for holder in load.holders.values():
        with contextlib.suppress(RayActorError):
            await holder.close.remote()
    try:
        state = await d.until(lambda s: not s["tickets"])
    except AssertionError as left:
        tally.wrong.append(f"tickets left with nothing held: {left}")
        return
    charged = sum(device["charged_bytes"] for device in state["devices"])
    if charged or await d.engines():
        tally.wrong.append(f"{charged / MIB:.0f} MiB charged with nothing held")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--label", help="of the report's file")
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    began = time.monotonic()
    try:
        tally = asyncio.run(chaos(args.kills, args.seed))
    finally:
        ray.shutdown()
    figures = tally.figures(time.monotonic() - began)
    figures["rounds_without_victim"] = tally.rounds_without_victim
    report.write("chaos", figures, seed=args.seed, label=args.label)
    print(f"rounds that found no victim and do not count: {tally.rounds_without_victim}")
    return tally.verdict()


if __name__ == "__main__":
    sys.exit(main())
