"""Whether an engine of a running graph computes."""

import contextlib
import os
import time
from pathlib import Path

from tests.graph.conftest import Graph, name_of


def serves(graph: Graph, model: str) -> bool:
    """With its engine up and a request in it."""
    rows = [t for t in graph.state()["tickets"] if t["model"] == model]
    return any(t["state"] == "resident" and t["inflight"] for t in rows)


class Processor:
    """What the processes of a model's engine use of the processor, look by look. They must live
    on meanwhile: an engine that has ended uses nothing either, and tells nothing."""

    def __init__(self, graph: Graph, model: str) -> None:
        name = f"engine:{model}"[:15]  # the kernel keeps no more
        [root] = [pid for pid in graph.engines() if name_of(pid) == name]
        self.pids = [pid for pid in graph.engines() if os.getpgid(pid) == root]
        self.looks = [(time.monotonic(), self.used_s())]

    def used_s(self) -> float:
        """Without threads nicer than their process: one gives a new cache its pages."""
        ticks = 0
        for pid in self.pids:
            nice = os.getpriority(os.PRIO_PROCESS, pid)  # of its first thread
            for task in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    stat = (task / "stat").read_text().rpartition(")")[2].split()
                    if int(stat[16]) <= nice:
                        ticks += int(stat[11]) + int(stat[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def has_computed(self) -> bool:
        """A quarter of a second since the first look."""
        return self.used_s() - self.looks[0][1] > 0.25

    def rests(self) -> bool:
        """It had less than a quarter of one core in the last half second."""
        self.looks.append((time.monotonic(), self.used_s()))
        now_s, used_s = self.looks[-1]
        then = [(at_s, used) for at_s, used in self.looks if at_s <= now_s - 0.5]
        return bool(then) and used_s - then[-1][1] < 0.25 * (now_s - then[-1][0])
