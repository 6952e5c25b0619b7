"""Every notebook runs from top to bottom, without the trace files and without a display."""

from pathlib import Path

import nbformat
import pytest
import ray
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
# Run by tests/graph, which has one.
NEEDS_A_SYSTEM = {
    "quickstart",
    "capabilities",
    "voice_turn",
    "memory_timeline",
    "task_ladder",
    "nightly_batch",
}
NOTEBOOKS = sorted(
    path for path in (ROOT / "notebooks").glob("*.ipynb") if path.stem not in NEEDS_A_SYSTEM
)
CELL_S = 200  # the longest cell takes some 5 s alone; a busy machine is several times slower

# Those that start an arbiter, on the session's cluster.
ON_A_CLUSTER = {"leases"}
# What a reader's figures are drawn of takes minutes; a part of it runs every line as well.
SMALLER = {
    "adapters_at_scale": ("REQUESTS, SEED = 1_000, 200, 1", "REQUESTS, SEED = 150, 100, 1"),
    "policies_on_traces": ("SEED, REQUESTS = 1, 3_000", "SEED, REQUESTS = 1, 1_000"),
}


def with_less(name: str, text: str) -> str:
    """The notebook with the smaller numbers, where it has some."""
    old, new = SMALLER.get(name, ("", ""))
    assert not old or text.count(old) == 1, f"{name} has no `{old}`"
    return text.replace(old, new) if old else text


@pytest.mark.spec("K6")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_to_its_end(
    path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if path.stem in ON_A_CLUSTER:
        request.getfixturevalue("cluster")
        address = ray.get_runtime_context().gcs_address
        monkeypatch.setenv("NOTEBOOK_RAY", address)
    monkeypatch.delenv("ARBITER_TRACES", raising=False)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.reads(with_less(path.stem, path.read_text()), as_version=4)
    where = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, timeout=CELL_S, kernel_name="python3", resources=where).execute()
    ran = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert ran and all(cell.execution_count for cell in ran)
