"""The picture of a run: which share of users had something useful after how many seconds."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

from benchmarks.one_card.player import LONGEST_S, Seen


def draw(rows: Mapping[str, Sequence[Seen]], file: Path) -> None:
    """Writes a PNG. Failures never arrive, so their line ends below 1."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=110)
    for name, seen in rows.items():
        live = [s for s in seen if s.kind != "batch"]
        ordered = sorted(s.useful_s for s in live if not s.failure)
        shares = [(n + 1) / len(live) for n in range(len(ordered))]
        is_ours = name == "ours"
        axes.step(ordered, shares, where="post", label=name, linewidth=2.6 if is_ours else 1.3)
    axes.set_xscale("log")
    axes.set_xlim(0.02, LONGEST_S)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("seconds to the first token, sound or whole object")
    axes.set_ylabel("share of requests")
    axes.set_title("Eight capabilities in 40 % of the memory they need")
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)
