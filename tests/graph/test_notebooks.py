"""Notebooks against the running system, as a reader runs them against theirs."""

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from deployments.front.access import keys
from deployments.front.access.keys import Scope
from tests.graph.conftest import ROOT, Graph, command_of
from tests.support.graph_commands import environment

CELL_S = 120  # the longest waits for two loads


@pytest.mark.spec("K6", "J7")
@pytest.mark.parametrize(
    "name", ["quickstart", "capabilities", "voice_turn", "memory_timeline", "nightly_batch"]
)
def test_notebook_runs_against_the_running_system(
    graph: Graph, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    execute(graph, monkeypatch, name)


@pytest.mark.spec("J5", "K6")
def test_notebook_of_a_ladder_runs_with_the_system_as_its_own_remote(
    graph: Graph, monkeypatch: pytest.MonkeyPatch, keys_file: Path
) -> None:
    theirs = keys.add(keys_file, "remote", "remote", frozenset({Scope.INFER}))
    file = graph.folder / "remote.key"
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "w") as stream:
        stream.write(theirs)
    cloud = keys.add(keys_file, "ann", "ann", frozenset({Scope.INFER, Scope.CLOUD}))
    monkeypatch.setenv("ARBITER_CLOUD_KEY", cloud)
    try:
        execute(graph, monkeypatch, "task_ladder")
    finally:
        file.unlink()


def execute(graph: Graph, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """From top to bottom, each cell within CELL_S."""
    [address] = {
        match[1]
        for pid in graph.workers()
        if (match := re.search(r"--gcs-address=(\S+)", command_of(pid)))
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
