"""Any process of the whole graph killed while the official client streams from the real engines.

Every request is answered or refused with a typed error, the next one is served, and afterwards the
books equal what the kernel measures and no engine is left that no ticket names.
"""

import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import APIError, OpenAI
from openai.types.chat import ChatCompletion

from tests.graph.conftest import Graph, until
from tests.support.graph_processes import VICTIMS, books_are_true, victims
from tests.support.graph_processor import Processor

CHAT = "tiny-chat"
# With the proxy the connections of its clients end, which is no typed error.
KINDS = sorted(VICTIMS.keys() - {"proxy"})
HELLO = [{"role": "user", "content": "Who holds the memory?"}]
TOKENS = 900  # of each of eight answers: some seconds


def stream_once(client: OpenAI) -> str:
    """ "answered", or the code of the typed error it ended with."""
    try:
        stream = client.chat.completions.create(
            model=CHAT, messages=HELLO, max_tokens=64, stream=True, extra_body={"ignore_eos": True}
        )
        pieces = [c.choices[0].delta.content for c in stream if c.choices]
    except APIError as error:
        assert error.code or error.type, f"an error without a type: {error!r}"
        return str(error.code or error.type)
    assert pieces, "an answer without a piece"
    return "answered"


@pytest.mark.spec("A18", "A19", "B1")
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_process_loses_nothing(graph: Graph, client: OpenAI, kind: str) -> None:
    assert stream_once(client) == "answered"
    stop = threading.Event()
    outcomes: Counter[str] = Counter()

    def load() -> None:
        while not stop.is_set():
            outcomes[stream_once(client)] += 1

    with ThreadPoolExecutor(4) as pool:
        loads = [pool.submit(load) for _ in range(4)]
        try:
            until(lambda: outcomes["answered"] >= 4, 60, "the load is under way")
            pids = victims(graph, kind)
            assert pids, f"no {kind} runs"
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            killed_at = outcomes["answered"]
            until(lambda: outcomes["answered"] >= killed_at + 8, 90, f"served again; {outcomes}")
        finally:
            stop.set()
        for one in loads:
            one.result()
    assert set(outcomes) <= {"answered", "engine_lost", "arbiter_unavailable"}
    until(lambda: books_are_true(graph), 60, "the books equal the measured bytes")
    assert stream_once(client) == "answered"


@pytest.mark.spec("A19", "N1")
def test_request_whose_engine_dies_before_its_first_byte_is_answered_by_the_next(
    graph: Graph, client: OpenAI
) -> None:
    """A whole answer has no byte before its end; the client itself asks once."""
    assert stream_once(client) == "answered"

    def ask() -> ChatCompletion:
        return client.chat.completions.create(
            model=CHAT, messages=HELLO, max_tokens=TOKENS, n=8, extra_body={"ignore_eos": True}
        )

    processor = Processor(graph, CHAT)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        until(processor.has_computed, 60, "its engine computes")
        old = victims(graph, "engine")
        assert old and not asked.done()
        for pid in old:
            os.kill(pid, signal.SIGKILL)
        answer = asked.result()
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 8
    assert answer.usage and answer.usage.completion_tokens == 8 * TOKENS
    assert not set(old) & set(victims(graph, "engine")), "another engine answered"
