"""What is kept of graphs, without onnxruntime."""

import os
import time
from pathlib import Path

import pytest

from deployments.engines.audio import ready_graphs
from deployments.engines.one_thread import MOST_THREADS, compute_threads


def test_what_a_killed_engine_left_leaves_after_an_hour(tmp_path: Path) -> None:
    old, new, made = tmp_path / ".making-a", tmp_path / ".making-b", tmp_path / ".making-c"
    for folder in (old, new, made):
        folder.mkdir()
        (folder / "graph.onnx").write_bytes(b"x")
    hours_ago_s = time.time() - 2 * ready_graphs.UNFINISHED_S
    os.utime(old, (hours_ago_s, hours_ago_s))
    ready_graphs._keep(made, tmp_path / "key")
    assert (tmp_path / "key" / "graph.onnx").is_file()
    assert (old.exists(), new.exists(), made.exists()) == (False, True, False)


def test_the_longest_unused_graph_leaves_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready_graphs, "MAX_BYTES", 250)
    for number, name in enumerate("abc"):
        scratch = tmp_path / f".making-{name}"
        scratch.mkdir()
        (scratch / "graph.onnx").write_bytes(b"x" * 100)
        os.utime(scratch, (time.time() - 100 + number,) * 2)
        ready_graphs._keep(scratch, tmp_path / name)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["b", "c"]


def test_speech_computes_on_each_core_up_to_a_bound_unless_told() -> None:
    assert compute_threads({"threads": 3}) == 3
    assert compute_threads({"threads": 3, "engine_args": {"threads": 2}}) == 2
    assert compute_threads({}) == min(MOST_THREADS, len(os.sched_getaffinity(0)))
