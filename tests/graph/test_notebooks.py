"""Notebooks against the running system, as a reader runs them against theirs."""

import re

import nbformat
import pytest
from nbclient import NotebookClient

from tests.graph.conftest import ROOT, Graph, command_of
from tests.support.graph_commands import environment

CELL_S = 120  # the longest waits for two loads


@pytest.mark.spec("K6", "J7")
@pytest.mark.parametrize("name", ["quickstart", "capabilities", "voice_turn", "memory_timeline"])
def test_notebook_runs_against_the_running_system(
    graph: Graph, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    [address] = {
        found[1]
        for pid in graph.workers()
        if (found := re.search(r"--gcs-address=(\S+)", command_of(pid)))
    }
    for variable, value in {
        "ARBITER_URL": graph.url,
        "ARBITER_KEY": environment(graph)["ARBITER_KEY"],
        "RAY_ADDRESS": address,
        "MPLBACKEND": "agg",
        "PYTHONPATH": str(ROOT),
    }.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    where = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, timeout=CELL_S, kernel_name="python3", resources=where).execute()
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
