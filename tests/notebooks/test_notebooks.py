"""Every notebook runs from top to bottom, without a display; the notebook that reads a trace with a
small one, too."""

import csv
import gzip
from pathlib import Path
from typing import Any

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


def run(path: Path, text: str) -> Any:
    """The notebook with what its cells printed."""
    notebook = nbformat.reads(text, as_version=4)
    where = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, timeout=CELL_S, kernel_name="python3", resources=where).execute()
    ran = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert ran and all(cell.execution_count for cell in ran), path
    return notebook


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
    run(path, with_less(path.stem, path.read_text()))


@pytest.mark.spec("K6")
def test_policies_are_compared_on_the_trace_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_trace(tmp_path / "servegen_m-small_rates.csv.gz")
    monkeypatch.setenv("ARBITER_TRACES", str(tmp_path))
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    path = ROOT / "notebooks" / "policies_on_traces.ipynb"
    whole = path.read_text()
    text = whole.replace(SMALLER[path.stem][0], "SEED, REQUESTS = 1, 300")
    assert text != whole
    said = printed(run(path, text))
    assert said.startswith("ServeGen m-small: ") and f" of {CLIENTS} clients " in said
    rows = [line for line in said.splitlines() if "belady" in line]
    assert len(rows) == 3, "of each budget"
    assert all("ServeGen m-small" in row for row in rows)


CLIENTS, WINDOWS = 24, 12


def write_trace(path: Path) -> None:
    """Two hours of rates in ServeGen's form: some clients ask three times as often as others, and
    each is away for a quarter of the time."""
    with gzip.open(path, "wt", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("client", "window_start_s", "rate_per_s", "cv"))
        for client in range(CLIENTS):
            for window in range(WINDOWS):
                rate = 0.0 if (client + window) % 4 == 0 else 0.1 * (10 + client)
                rows.writerow((client, window * 600, rate, 2.0))


def printed(notebook: Any) -> str:
    cells = (cell for cell in notebook.cells if cell.cell_type == "code")
    outputs = (output for cell in cells for output in cell.outputs)
    return "".join(output.get("text", "") for output in outputs)
