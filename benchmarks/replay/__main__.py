"""Every eviction policy on public traces, through the real core in virtual time.

python -m benchmarks.replay --traces DIR --trace servegen-small
python -m benchmarks.replay --synthetic          # needs no files, proves nothing
python -m benchmarks.replay --traces DIR --fit   # start weights of the learned policy
"""

import argparse
import sys
from collections.abc import Iterable
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from itertools import product
from statistics import mean

from arbiter.core.records import reuse
from benchmarks.replay import prepare, traces
from benchmarks.replay.mixes import MIXES
from benchmarks.replay.table import (
    BEGINNINGS,
    WARM_FRACTION,
    WITHOUT,
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
POLICIES = sorted({*EVICT, *BEGINNINGS, *(f"{WITHOUT}{family}" for family in FITTED)})
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


def cases_of(names: Iterable[str], args: argparse.Namespace) -> list[Case]:
    return [Case(*case) for case in product(names, (MIXES[m] for m in args.mix), args.budget)]


def rows_of(args: argparse.Namespace, case: Case) -> list[Row]:
    reuse.WINDOWS = tuple(args.windows)
    tuned, everything = halves(arrivals(case.trace, args))
    used = tuned if args.tune else everything
    counted_from_s = used[-1][0] * (WARM_FRACTION if args.tune else 0.5)
    return list(run(case, used, counted_from_s, args.policy, args.seed))


def weights_of(args: argparse.Namespace, case: Case) -> list[float]:
    reuse.WINDOWS = tuple(args.windows)
    return last_weights(case, arrivals(case.trace, args), args.seed)


def fitted(args: argparse.Namespace, pool: Executor) -> dict[str, object]:
    """The start weights: the mean of all families, of which each trace counts the same."""
    by_family = {}
    for family, names in FITTED.items():
        cases = cases_of(names, args)
        of_traces: dict[str, list[list[float]]] = {}
        weights = pool.map(partial(weights_of, args), cases)
        for case, row in zip(cases, weights, strict=True):
            print(case.trace, case.mix.name, *(f"{weight:.2f}" for weight in row), flush=True)
            of_traces.setdefault(case.trace, []).append(row)
        by_family[family] = _means([_means(rows) for rows in of_traces.values()])
    return {"families": by_family, "born": _means(list(by_family.values()))}


def _means(rows: list[list[float]]) -> list[float]:
    """Place by place."""
    return [mean(column) for column in zip(*rows, strict=True)]


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
    made.add_argument(
        "--windows", nargs=3, type=float, default=reuse.WINDOWS, help="of the learned policy"
    )
    made.add_argument("--processes", type=int, default=1, help="each runs one cell at a time")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--label", help="of the JSON file")
    return made


def main() -> None:
    args = parser().parse_args()
    names = ["synthetic"] if args.synthetic else args.trace
    rows: list[Row] = []
    with ProcessPoolExecutor(args.processes) as pool:
        try:
            if args.fit:
                write("replay", fitted(args, pool), args.seed, args.label or "fit")
                return
            for case_rows in pool.map(partial(rows_of, args), cases_of(names, args)):
                for row in case_rows:
                    print(row, flush=True)
                rows += case_rows
        except traces.TracesAbsent as absent:
            sys.exit(str(absent))
    means = mean_closed(rows)
    for policy, parts in means.items():
        print(f"{policy:<15}", "  ".join(f"{name} {part:.2f}" for name, part in parts.items()))
    figures = {"rows": [row.as_dict() for row in rows], "mean": means, "tuned_half": args.tune}
    write("replay", figures, args.seed, args.label)


if __name__ == "__main__":
    main()
