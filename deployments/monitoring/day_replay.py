"""The process that replays the last day for the metrics: `python -m` of this module (K2).

It reads what the arbiter has pickled from its standard input, and prints the costs as JSON.
"""

import json
import os
import pickle
import resource
import sys
from dataclasses import replace

from arbiter.core.settings import Settings
from arbiter.protocol.json_codec import to_json
from arbiter.replay.demand import Demand
from arbiter.replay.recorded import DAY, DemandReader, NothingLoaded
from arbiter.replay.score import ReplayedDay, Score
from arbiter.replay.world import World
from arbiter.units import Instant, Span
from deployments.config.outside_policies import outside
from policies import bundle

LOWEST = 19  # nice
PROCESSOR_MOST_S = 60  # five times what the most uses take
LRU, FORESIGHT = "priority_lru", "belady"


def replayed(reader: DemandReader, settings: Settings, now: Instant) -> ReplayedDay | None:
    """Returns None while no model was loaded or used within the day."""
    since = Instant(max(0, now - DAY))
    try:
        demand = reader.demand(since)
    except NothingLoaded:
        return None
    if not len(demand.uses):
        return None
    policies = {"chosen": settings.evict, "lru": LRU, "belady": FORESIGHT}
    by_name = {name: _score(demand, settings, name) for name in set(policies.values())}
    scores = {part: by_name[name] for part, name in policies.items()}
    return ReplayedDay(Span(now - reader.began(since)), scores)


def _score(demand: Demand, settings: Settings, evict: str) -> Score:
    chosen = replace(settings, evict=evict)
    return World(demand, chosen, bundle(chosen, outside(chosen))).run()


def main() -> None:
    os.nice(LOWEST)
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_MOST_S, PROCESSOR_MOST_S))
    print(json.dumps(to_json(replayed(*pickle.load(sys.stdin.buffer)))))


if __name__ == "__main__":
    main()
