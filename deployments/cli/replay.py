"""`arbiter record` and `arbiter whatif`: what happened, and what other policies would have cost."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from arbiter.units import GIB
from deployments.cli.cluster.lifecycle import Address, connected
from deployments.cli.output import AsJson, among, show, table, working

if TYPE_CHECKING:
    from arbiter.core.settings import Settings
    from arbiter.replay.demand import Demand
    from arbiter.replay.score import Score
    from arbiter.server.recording import RecordingHeader

BEST = "belady"


def record(
    file: Annotated[
        Path | None,
        typer.Argument(help="On the arbiter's node. Without it, recording ends."),
    ] = None,
    address: Address = "auto",
    as_json: AsJson = False,
) -> None:
    """Write every event into a file, from now on. Restarts the arbiter: its next epoch begins."""
    path = str(file.absolute()) if file else None
    with working("joining the cluster") as now, connected(address):
        from arbiter.client.admin import record_arbiter

        now("asking the arbiter, which restarts to begin or end a recording")
        record_arbiter(path)
    message = f"every event from now on is in {path}" if path else "nothing is recorded any more"
    show(as_json, {"recording": path}, message)


def _policies() -> list[str]:
    from policies import EVICT

    return sorted(EVICT)


def whatif(
    log: Annotated[Path, typer.Argument(help="A file that `arbiter record` wrote.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            callback=among("policy", _policies),
            autocompletion=_policies,
            help="An eviction policy to compare; once for each.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Replay a recording, as it was and under other policies."""
    with working("reading the recording") as now:
        comparison = compared(log, policy or [], lambda name: now(f"replaying under {name}"))
    show(as_json, comparison, *_comparison(comparison))


def compared(path: Path, policies: list[str], begins: Any = lambda policy: None) -> dict[str, Any]:
    """The busiest epoch in a recording: whether this core still decides as it did, and what each
    policy would have cost, the recorded one and foresight among them. Raises RecordingUnreadable,
    NothingLoaded."""
    from arbiter.replay.recorded import demand_of
    from arbiter.server.recording import read, replay
    from policies import bundle

    life = max(read(path), key=lambda life: len(life.events))
    settings = life.heading.settings
    steps = list(replay(life, bundle(settings)))
    same_count = next((n for n, step in enumerate(steps) if not step.is_same), len(steps))
    demand = demand_of(steps)
    scores = {}
    for name in dict.fromkeys([settings.evict, *policies, BEST]):
        begins(name)
        scores[name] = _score(demand, settings, name, learned_before(life.heading))
    return {
        "recorded_policy": settings.evict,
        "events": len(life.events),
        "decided_as_recorded": same_count,
        "policies": {name: _row(score, scores[BEST]) for name, score in scores.items()},
    }


def learned_before(heading: "RecordingHeader") -> dict[str, Any]:
    """Returns what the core had learned of reuse before the recording began. It is told in
    turnovers, so it holds in a replay, whose clock begins at 0; rates and hours do not."""
    learned = (heading.usage or {}).get("reuse")
    return {"reuse": learned} if learned else {}


def _score(demand: "Demand", settings: "Settings", evict: str, usage: dict[str, Any]) -> "Score":
    from arbiter.replay.world import World
    from policies import bundle

    chosen = replace(settings, evict=evict)
    return World(demand, chosen, bundle(chosen), usage=usage).run()


def _row(score: "Score", best: "Score") -> dict[str, float]:
    """Returns the score with its regret: what it cost beyond foresight."""
    from arbiter.replay.score import as_plain

    regret = {
        "regret_loads": score.loads_count - best.loads_count,
        "regret_moved_bytes": score.moved_bytes - best.moved_bytes,
        "regret_waited_s": (score.waited - best.waited) / 1e9,
    }
    return as_plain(score) | regret


def _comparison(comparison: dict[str, Any]) -> Iterator[RenderableType]:
    same, events = comparison["decided_as_recorded"], comparison["events"]
    yield f"{events} events, recorded under {comparison['recorded_policy']}; " + (
        "this core decides all of them as it was recorded"
        if same == events
        else f"this core decides differently from event {same} on"
    )
    heads = (
        "policy",
        "uses",
        "missed",
        "loads",
        "wakes",
        "moved GiB",
        "waited s",
        "p99 s",
        "regret s",
    )
    rows = [
        (
            name,
            row["requests_count"],
            row["missed_count"],
            row["loads_count"],
            row["wakes_count"],
            f"{row['moved_bytes'] / GIB:.2f}",
            f"{row['waited_s']:.2f}",
            f"{row['waited_p99_s']:.2f}",
            f"{row['regret_waited_s']:.2f}",
        )
        for name, row in comparison["policies"].items()
    ]
    yield table(heads, rows, numbers=heads[1:])
