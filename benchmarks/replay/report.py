"""What records of replays say: the part of the gap from least recently used to foresight that each
policy closes, trace by trace.

python -m benchmarks.replay.report docs/benchmarks/replay_learned_*.json
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from benchmarks.replay.table import BEST, WORST

PARTS = {
    "missed_fraction": "missed_count",
    "moved_fraction": "moved_bytes",
    "waited_fraction": "waited_s",
}
# Where foresight saves less than this, a part of what it saves is chance.
LEAST_MISSES_COUNT, LEAST_GAP = 30, 0.05  # of what least recently used costs
Plain = Mapping[str, Any]


class Closed(NamedTuple):
    """One part of one policy on one trace."""

    fraction: float
    cells_count: int
    below_count: int  # cells in which least recently used is better


def read(paths: Iterable[Path]) -> list[Plain]:
    """Returns the rows of records."""
    return [row for path in paths for row in json.loads(path.read_text())["figures"]["rows"]]


def by_trace(rows: Iterable[Plain], policy: str) -> dict[str, dict[str, Closed]]:
    """Returns what a policy closes of each part of each trace. A cell counts where foresight saves
    LEAST_MISSES_COUNT misses and LEAST_GAP of the part."""
    cells: dict[tuple[str, str, str], dict[str, Plain]] = {}
    for row in rows:
        cell = cells.setdefault((row["trace"], row["mix"], row["budget_fraction"]), {})
        cell[row["policy"]] = row
    values_by_trace: dict[str, dict[str, list[float]]] = {}
    for (trace, *_), cell in cells.items():
        if policy in cell:
            for part in filter(lambda part: _is_wide(cell, part), PARTS):
                values = values_by_trace.setdefault(trace, {}).setdefault(part, [])
                values.append(cell[policy][part])
    return {
        trace: {
            part: Closed(mean(values), len(values), sum(value < 0 for value in values))
            for part, values in parts.items()
        }
        for trace, parts in values_by_trace.items()
    }


def _is_wide(cell: Mapping[str, Plain], part: str) -> bool:
    worst, best = cell[WORST], cell[BEST]
    missed_count = worst["missed_count"] - best["missed_count"]
    cost = PARTS[part]
    gap = worst[cost] - best[cost]
    return bool(missed_count >= LEAST_MISSES_COUNT and gap >= LEAST_GAP * worst[cost])


def main() -> None:
    rows = read(map(Path, sys.argv[1:]))
    for policy in sorted({row["policy"] for row in rows} - {WORST, BEST}):
        traces = by_trace(rows, policy)
        for trace, parts in sorted(traces.items()):
            print(policy, trace, *(_said(part, parts.get(part)) for part in PARTS), sep="  ")
        print(policy, "mean of traces", *(_mean(part, traces.values()) for part in PARTS), sep="  ")


def _said(part: str, closed: Closed | None) -> str:
    if closed is None:
        return f"{part} -"
    cells = f"{closed.cells_count} cells, {closed.below_count} below"
    return f"{part} {closed.fraction:.2f} ({cells})"


def _mean(part: str, traces: Iterable[Mapping[str, Closed]]) -> str:
    known = [parts[part].fraction for parts in traces if part in parts]
    return f"{part} {mean(known):.2f}" if known else f"{part} -"


if __name__ == "__main__":
    main()
