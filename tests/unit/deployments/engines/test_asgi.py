"""ASGI as all engines speak it: bodies, clients that leave, answers."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from arbiter.errors import ArbiterUnavailable
from deployments.engines import asgi, command_line
from deployments.engines.protocol import Receive

Sent = list[dict[str, Any]]


def part(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


LEAVES = {"type": "http.disconnect"}


def client(*messages: dict[str, Any]) -> Receive:
    """Sends these, then stays silent."""
    left: Iterator[dict[str, Any]] = iter(messages)

    async def receive() -> Any:
        for message in left:
            return message
        return await asgi.never()

    return receive


def sender(sent: Sent) -> Callable[[Any], Any]:
    async def send(message: Any) -> None:
        sent.append(message)

    return send


async def test_body_is_read_to_its_end() -> None:
    assert await asgi.read_body(client(part(b"a", True), part(b"b"))) == b"ab"
    assert await asgi.read_body(client({"type": "http.request"})) == b""


@pytest.mark.spec("J8")
async def test_body_of_a_client_that_leaves_while_it_sends_is_none() -> None:
    assert await asgi.read_body(client(part(b"{", True), LEAVES)) is None


@pytest.mark.spec("L3")
async def test_body_is_refused_before_all_of_it_is_read() -> None:
    receive = client(part(b"abc", True), part(b"d", True))
    with pytest.raises(asgi.BodyTooLarge, match="larger than 3 bytes"):
        await asgi.read_body(receive, most_bytes=3)
    assert await asgi.read_body(client(part(b"abc")), most_bytes=3) == b"abc"


async def test_replayed_body_comes_once_and_then_what_the_client_sends() -> None:
    receive = asgi.replay(b"all", client(LEAVES))
    assert await asgi.read_body(receive) == b"all"
    assert await receive() == LEAVES


async def test_work_gives_its_result_when_the_client_stays() -> None:
    async def work() -> int:
        return 3

    assert await asgi.until_disconnected(work(), client()) == 3


@pytest.mark.spec("J8")
async def test_work_is_cancelled_and_ended_when_its_client_leaves() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async with asyncio.timeout(60):
        assert await asgi.until_disconnected(work(), client(LEAVES)) is None
    assert ended == [True]


async def test_error_of_the_work_is_raised() -> None:
    async def work() -> None:
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        await asgi.until_disconnected(work(), client())


async def test_refusal_is_an_error_object_with_its_length() -> None:
    sent: Sent = []
    await asgi.refuse(sender(sent), 404, "no route /x", param="path")
    start, answer = sent
    headers = dict(start["headers"])
    assert start["status"] == 404
    assert headers[b"content-length"] == b"%d" % len(answer["body"])
    error = json.loads(answer["body"])["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "path")
    await asgi.refuse(sender(sent), 503, "asleep", kind="NotAwake")
    assert json.loads(sent[-1]["body"])["error"]["type"] == "NotAwake"


async def test_refused_request_says_when_to_come_back() -> None:
    sent: Sent = []
    await asgi.refuse_request(sender(sent), ArbiterUnavailable(9.0, 4.0))
    headers = dict(sent[0]["headers"])
    assert sent[0]["status"] == ArbiterUnavailable.status_code
    assert headers[b"retry-after"] == b"4"
    assert headers[b"content-type"] == b"application/json"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, []),
        ({}, []),
        ([], []),
        (True, ["--max-len"]),
        (False, ["--no-max-len"]),
        (0, ["--max-len", "0"]),
        (["a", 2], ["--max-len", "a", "2"]),
        ({"a": 1}, ["--max-len", '{"a": 1}']),
    ],
)
def test_engine_argument_becomes_words_of_a_command(value: object, words: list[str]) -> None:
    assert command_line.words("max_len", value) == words
