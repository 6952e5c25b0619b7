"""Seconds to the first answer of each capability, against its library in a fresh process.

    python -m benchmarks.first_answer --rounds 3

The shipped graph and its eight capabilities, the first model of each. In each round, one capability
after the other: from zero replicas; with the replica up and the engine gone; at once again, which
says what of it is the answer itself; and the same request to the bare library (benchmarks.bare),
from exec to its answer, beside the graph at rest.
"""

import argparse
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import bare, report, servers
from benchmarks.calls import Call, answer, calls, models_of, spoken
from benchmarks.first_token import at_rest, no_engine_left, shipped, state, table_of

KEEP_WARM_S, DOWNSCALE_S = 1, 4  # between the two the replica is up and its engine gone
BAR = 0.25  # of the bare library's seconds
STATES = ("engine_gone", "zero_replicas")
ANSWERS = ("warm", "bare_answer")  # the answer alone: of a resident model, and of a loaded library
Row = Mapping[str, float]


class Graph:
    """The running graph, and what to ask of it."""

    def __init__(self, url: str, table: dict[str, Any], folder: Path) -> None:
        self.url, self.table, self.folder = url, table, folder
        self.models = models_of(table)
        self.calls: dict[str, Call] = calls(spoken(url, self.models["tts"]))

    def ask(self, capability: str) -> float:
        """Seconds."""
        return answer(self.url, self.calls[capability], self.models[capability])[1]

    def bare(self, capability: str) -> bare.Measured:
        task = bare.task_of(self.table, capability, self.calls[capability], self.folder)
        return bare.measured(task)

    def round(self, capability: str) -> Row:
        """Seconds of each side."""
        at_rest(self.url)
        zero_s = self.ask(capability)
        no_engine_left(self.url)
        before = self._holders()
        gone_s = self.ask(capability)
        if before != self._holders():
            raise RuntimeError(f"{capability}: its replica left before the second request")
        seconds = {"zero_replicas": zero_s, "engine_gone": gone_s, "warm": self.ask(capability)}
        at_rest(self.url)
        alone = self.bare(capability)
        seconds |= {"bare": alone.seconds, "bare_answer": alone.answer_s}
        told = ", ".join(f"{name} {took_s:.2f} s" for name, took_s in seconds.items())
        print(f"{capability}: {told}", flush=True)
        return seconds

    def _holders(self) -> set[str]:
        return {holder["holder"] for holder in state(self.url)["holders"]}


def figures_of(rows: Iterable[Row]) -> dict[str, Any]:
    """Of one capability: seconds of each side, and the ratios round by round."""
    rows = list(rows)
    sides = {name: [row[name] for row in rows] for name in (*STATES, *ANSWERS, "bare")}
    figures: dict[str, Any] = {f"{name}_s": report.Sample(tuple(s)) for name, s in sides.items()}
    for name in STATES:
        ratio = report.paired_ratio(sides[name], sides["bare"])
        figures |= {f"{name}_ratio": ratio, f"{name}_meets_bar": ratio.median <= BAR}
    figures["answer_ratio"] = report.paired_ratio(*(sides[name] for name in ANSWERS))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--capabilities", nargs="+", choices=list(bare.LIBRARIES))
    args = parser.parse_args()
    config = shipped(KEEP_WARM_S, DOWNSCALE_S)
    asked = args.capabilities or list(bare.LIBRARIES)
    rows: dict[str, list[Row]] = {capability: [] for capability in asked}
    with tempfile.TemporaryDirectory() as folder, servers.our_graph(config, "default") as url:
        graph = Graph(url, table_of(config), Path(folder))
        for capability in asked:  # waits for the zygotes' imports, which is not counted
            graph.ask(capability)
        for _ in range(args.rounds):
            for capability in asked:
                rows[capability].append(graph.round(capability))
    figures = {capability: figures_of(rounds) for capability, rounds in rows.items()}
    for capability, samples in figures.items():
        for name, sample in samples.items():
            print(f"{capability}: {name} {sample}")
    result = {"bar": BAR, "load_average": os.getloadavg()[0], **figures}
    report.write("first_answer", result, label="_".join(args.capabilities or []))


if __name__ == "__main__":
    main()
