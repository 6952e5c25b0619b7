"""Every eviction policy on public traces, through the real core in virtual time.

python -m benchmarks.replay --traces DIR --trace servegen-small
python -m benchmarks.replay --synthetic          # needs no files, proves nothing
python -m benchmarks.replay --traces DIR --fit   # start weights of the learned policy
"""

import argparse
import sys
from statistics import mean

from benchmarks.replay import prepare, traces
from benchmarks.replay.mixes import MIXES
from benchmarks.replay.table import (
    FROM_NOTHING,
    WARM_FRACTION,
    Case,
    Row,
    halves,
    last_weights,
    mean_closed,
    run,
)
from benchmarks.report import write
from policies import EVICT

REQUESTS_COUNT = 60_000  # in 14 days: one in 20 s, so that a model of median rate rests for minutes
STRETCH = 40  # one hour becomes forty: Azure's five requests a second one in seven seconds
BUDGETS = (0.05, 0.1, 0.25, 0.5)
# Who asks is known in ServeGen's and of caffeine's objects; drawn by dice in the other three.
SERVEGEN = tuple(f"servegen-{name}" for name in ("small", "mid", *prepare.SERVEGEN))
DRAWN = ("mooncake", "azure-code", "azure-conv")
OBJECTS = (*prepare.LIRS, *prepare.CACHE2K, "scarab", *prepare.MESSAGES)
# The half of the traces on which the start weights of the learned policy were fitted, by family. No
# trace of the other half has a part in them: ServeGen's, and of caffeine's cs, gli and ps.
FITTED = {
    "programs": ("2_pools", "cpp", "multi1", "multi2", "multi3", "sprite"),
    "products": (*prepare.CACHE2K, "scarab"),
    "services": DRAWN,
    "messages": tuple(prepare.MESSAGES),
}
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


def fitted(args: argparse.Namespace) -> dict[str, object]:
    """The start weights: the mean of all families, of which each trace counts the same."""
    by_family = {}
    for family, names in FITTED.items():
        of_traces = []
        for name in names:
            came = arrivals(name, args)
            cases = [Case(name, MIXES[mix], budget) for mix in args.mix for budget in args.budget]
            weights = [last_weights(case, came, args.seed) for case in cases]
            of_traces.append([mean(row) for row in zip(*weights, strict=True)])
            print(name, *(f"{weight:.2f}" for weight in of_traces[-1]), flush=True)
        by_family[family] = [mean(row) for row in zip(*of_traces, strict=True)]
    return {
        "families": by_family,
        "born": [mean(row) for row in zip(*by_family.values(), strict=True)],
    }


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__)
    made.add_argument("--traces", help="folder of the trace files (default: $ARBITER_TRACES)")
    made.add_argument("--trace", nargs="+", choices=TRACES, default=list(TRACES))
    made.add_argument("--synthetic", action="store_true", help="instead of any trace")
    made.add_argument("--requests", type=int, default=REQUESTS_COUNT, help="kept of ServeGen's")
    made.add_argument("--mix", nargs="+", choices=sorted(MIXES), default=sorted(MIXES))
    made.add_argument("--budget", nargs="+", type=float, default=list(BUDGETS))
    made.add_argument("--policy", nargs="+", choices=POLICIES, default=sorted(EVICT))
    made.add_argument("--fit", action="store_true", help="start weights, on half of the traces")
    made.add_argument("--tune", action="store_true", help="on the first half instead")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--label", help="of the JSON file")
    return made


def main() -> None:
    args = parser().parse_args()
    names = ["synthetic"] if args.synthetic else args.trace
    try:
        if args.fit:
            write("replay", fitted(args), args.seed, args.label or "fit")
            return
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
