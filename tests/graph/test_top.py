"""`arbiter top` beside the running graph."""

import pytest
from openai import OpenAI

from deployments.cli.see.top.rows import TABS
from tests.graph.conftest import Graph, until
from tests.support.graph_commands import environment, run_command
from tests.support.terminal import Terminal

CHAT = "tiny-chat"
HELLO = [{"role": "user", "content": "Who holds the memory?"}]


@pytest.mark.spec("K4")
def test_top_shows_a_load_as_it_happens_and_where_the_model_is(
    graph: Graph, client: OpenAI
) -> None:
    words = ["-m", "deployments.cli", "top", "--url", graph.url]
    with Terminal(words, environment(graph)) as terminal:
        terminal.read_until(f"{graph.node}/cpu:0")
        terminal.write("\t" * TABS.index("events"))
        client.chat.completions.create(model=CHAT, messages=HELLO, max_tokens=2)
        terminal.read_until(f"{CHAT} has answered a request")

        def is_shown_where_it_is() -> bool:
            """On a busy machine the command may come after the model's keep-warm time."""
            client.chat.completions.create(model=CHAT, messages=HELLO, max_tokens=2)
            lines = [line.split() for line in run_command(graph, "top", "--once").splitlines()]
            [row] = [line for line in lines if line[:1] == [CHAT] and "chat" in line[1:2]]
            return row[2] == "resident"

        until(is_shown_where_it_is, 60, "top shows the model where it is")
        terminal.write("q")
        assert terminal.exit_status() == 0
