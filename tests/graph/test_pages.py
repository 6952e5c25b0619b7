"""The pages of the documentation against the running graph, pasted block by block."""

from pathlib import Path

import pytest

from tests.graph.conftest import Graph, until
from tests.support.graph_commands import environment, unload_all
from tests.support.pages import NOT_RUN, PAGES, as_checkout, run, to_paste

AS_ONE = "python.md"  # its blocks are one program, which tests/graph/test_python.py runs
LIVE = [
    page
    for page in PAGES
    if page.name != AS_ONE and any(b.name not in NOT_RUN for b in to_paste(page))
]
FRONT = "localhost:8000"


@pytest.mark.spec("M4", "M3")
@pytest.mark.parametrize("page", LIVE, ids=lambda page: page.stem)
def test_page_can_be_followed_by_pasting(graph: Graph, tmp_path: Path, page: Path) -> None:
    as_checkout(tmp_path)
    # Keys that a page makes are not this graph's, whose own tests look at its file.
    here = environment(graph) | {"XDG_STATE_HOME": str(tmp_path / "state")}
    # As at a fresh start: no block waits for what another test used last.
    until(lambda: unload_all(graph), 60, "no model of another test is loaded")
    for block in to_paste(page):
        if block.name not in NOT_RUN:
            text = block.text.replace(FRONT, graph.url.removeprefix("http://"))
            run(text, tmp_path, here, block.language)
