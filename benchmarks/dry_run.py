"""How long a dry run holds up a live arbiter (K3), by how many models are resident.

    python -m benchmarks.dry_run [--samples 50]

No Ray and no engine: nodes of 50 idle residents each, and a lease that needs some of them to leave.
The arbiter does nothing else meanwhile, so the time is what every other call waits longer.
"""

import argparse
import time

from arbiter.core import types
from arbiter.core.reports.plan import Answer, PlanQuestion
from arbiter.units import GIB, Bytes, Instant, NodeId, seconds
from benchmarks import report
from benchmarks.core_scale import SEED, Scene

RESIDENTS = 50  # of a node
NODES = (1, 10, 40)


def measured(nodes: int, samples: int) -> report.Sample:
    """Milliseconds of each dry run."""
    scene = Scene(nodes, RESIDENTS, 0)
    question = PlanQuestion(
        "lease",
        "job",
        types.Need(Bytes(16 * GIB)),
        True,
        priority=types.Priority.URGENT,
        node=NodeId("n0"),
        lease=types.LeaseConditions("t", seconds(60), seconds(0)),
    )
    took = []
    for _ in range(samples):
        began = time.thread_time()
        made = scene.core.plan(question, Instant(scene.now))
        took.append((time.thread_time() - began) * 1e3)
        assert made.answer is Answer.AFTER_EVICTING, made.sentences
    return report.Sample(tuple(took))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=50)
    samples = parser.parse_args().samples
    figures: dict[str, object] = {}
    for nodes in NODES:
        took = measured(nodes, samples)
        figures[f"{nodes * RESIDENTS} models"] = {
            "ms": took.as_dict(),
            "largest_ms": max(took.values),
        }
        print(f"{nodes * RESIDENTS} models: {took} ms, at most {max(took.values):.0f}", flush=True)
    report.write("dry_run", figures, seed=SEED)


if __name__ == "__main__":
    main()
