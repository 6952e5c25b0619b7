"""Every eviction policy on public traces, through the real core in virtual time.

python -m benchmarks.replay --traces DIR --trace servegen-small
python -m benchmarks.replay --synthetic          # needs no files, proves nothing
"""

import argparse
import sys

from benchmarks.replay import prepare, traces
from benchmarks.replay.mixes import MIXES
from benchmarks.replay.table import FROM_NOTHING, WARM_FRACTION, Case, Row, halves, mean_closed, run
from benchmarks.report import write
from policies import EVICT

REQUESTS_COUNT = 60_000  # in 14 days: one in 20 s, so that a model of median rate rests for minutes
STRETCH = 40  # one hour becomes forty: Azure's five requests a second one in seven seconds
BUDGETS = (0.05, 0.1, 0.25, 0.5)
# Who asks is known in ServeGen's and of caffeine's objects; drawn by dice in the other three.
SERVEGEN = tuple(f"servegen-{name}" for name in ("small", "mid", *prepare.SERVEGEN))
DRAWN = ("mooncake", "azure-code", "azure-conv")
OBJECTS = (*prepare.LIRS, *prepare.CACHE2K, "scarab", *prepare.MESSAGES)
POLICIES = sorted({*EVICT, *FROM_NOTHING})
TRACES = (*SERVEGEN, *DRAWN, *OBJECTS)


def arrivals(name: str, args: argparse.Namespace) -> list[traces.Arrival]:
    """Raises TracesAbsent."""
    if name == "synthetic":
        return traces.synthetic(args.requests, args.seed)
    folder = traces.folder(args.traces)
    if name in OBJECTS:
        return traces.objects(folder / f"objects_{name}.csv.gz")
    kind, _, which = name.partition("-")
    if kind == "servegen":
        path = folder / f"servegen_m-{which}_rates.csv.gz"
        return traces.servegen(path, args.requests, args.seed)
    if kind == "mooncake":
        return traces.mooncake(folder / "mooncake_conversation.jsonl.gz", STRETCH, args.seed)
    return traces.azure(folder / f"AzureLLMInferenceTrace_{which}.csv.gz", STRETCH, args.seed)


def rows_of(name: str, args: argparse.Namespace) -> list[Row]:
    came = arrivals(name, args)
    tuned, everything = halves(came)
    used = tuned if args.tune else everything
    counted_from_s = used[-1][0] * (WARM_FRACTION if args.tune else 0.5)
    rows: list[Row] = []
    for mix in args.mix:
        for budget_fraction in args.budget:
            case = Case(name, MIXES[mix], budget_fraction)
            for row in run(case, used, counted_from_s, args.policy, args.seed):
                print(row, flush=True)
                rows.append(row)
    return rows


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__)
    made.add_argument("--traces", help="folder of the trace files (default: $ARBITER_TRACES)")
    made.add_argument("--trace", nargs="+", choices=TRACES, default=list(TRACES))
    made.add_argument("--synthetic", action="store_true", help="instead of any trace")
    made.add_argument("--requests", type=int, default=REQUESTS_COUNT, help="kept of ServeGen's")
    made.add_argument("--mix", nargs="+", choices=sorted(MIXES), default=sorted(MIXES))
    made.add_argument("--budget", nargs="+", type=float, default=list(BUDGETS))
    made.add_argument("--policy", nargs="+", choices=POLICIES, default=sorted(EVICT))
    made.add_argument("--tune", action="store_true", help="on the first half instead")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--label", help="of the JSON file")
    return made


def main() -> None:
    args = parser().parse_args()
    names = ["synthetic"] if args.synthetic else args.trace
    try:
        rows = [row for name in names for row in rows_of(name, args)]
    except traces.TracesAbsent as absent:
        sys.exit(str(absent))
    means = mean_closed(rows)
    for policy, parts in means.items():
        print(f"{policy:<15}", "  ".join(f"{name} {part:.2f}" for name, part in parts.items()))
    figures = {"rows": [row.as_dict() for row in rows], "mean": means, "tuned_half": args.tune}
    write("replay", figures, args.seed, args.label)


if __name__ == "__main__":
    main()
