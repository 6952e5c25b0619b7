"""Remotes that mean harm, over real sockets of loopback: none takes time, memory or a connection
beyond its bounds, and nothing of theirs but data reaches a client."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import dns.message
import dns.rrset
import pytest
import trustme

from deployments import messages
from deployments.remotes.offers import RemoteFailed
from deployments.remotes.remotes import Remotes
from tests.support.hostile_remotes import (
    EVENT,
    JSON,
    OK,
    SSE,
    drips,
    forever,
    hangs,
    resets,
    says,
)
from tests.support.ports import free_port
from tests.support.remote_server import Answer, CountingBook, raw_remote
from tests.unit.deployments.remotes.conftest import CLOUD, KEY, asked, section

QUICK = {"head_s": 0.3, "idle_s": 0.3, "total_s": 1.0, "answer_bytes": 1 << 20}
CHATTED = b'{"choices": [{"message": {}}], "usage": {"prompt_tokens": 1}}'
# Objects of status 200 that are no answer to a chat, and no event of one.
NO_CHATS = (
    b"{}",
    b'{"choices": []}',
    b'{"choices": {"message": {}}}',
    b'{"choices": [{}]}',
    b'{"choices": [{"message": "a"}]}',
    b'{"choices": [{"message": {"tool_calls": [{"id": "a"}]}}]}',
    b'{"choices": [{"message": {}, "finish_reason": []}]}',
    b'{"choices": [{"message": {}}], "usage": [7]}',
    b'{"choices": [{"message": {}, "logprobs": [NaN]}]}',
    b'{"choices": [{"message": {}}], "x": -Infinity}',
)
NO_EVENTS = (
    b'{"choices": {"delta": {}}}',
    b'{"choices": ["a"]}',
    b'{"choices": [{"delta": "a"}]}',
    b'{"choices": [{"delta": {"tool_calls": [{"function": {"arguments": []}}]}}]}',
    b'{"choices": [{"delta": {}, "logprobs": [NaN]}]}',
)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEIR_KEY", KEY)


async def failure(
    port: int,
    *,
    stream: bool = False,
    book: CountingBook | None = None,
    resolver: Callable[[], aiohttp.abc.AbstractResolver] | None = None,
    **row: Any,
) -> tuple[str, str, list[messages.Part]]:
    """The kind of failure, its words, and the parts that came before it."""
    remotes = Remotes(book or CountingBook(), resolver)
    row = {"url": f"http://127.0.0.1:{port}/v1", "bounds": QUICK} | row
    remotes.configure(section(row.pop("url"), **row))
    call = remotes.call(await asked(**({"stream": True} if stream else {})), "far-chat", CLOUD)
    parts: list[messages.Part] = []
    with pytest.raises(RemoteFailed) as failed:
        async with aclosing(remotes.run(call)) as running:
            async for part in running:
                parts.append(part)
    await remotes.background.done()
    assert KEY not in str(failed.value)
    return failed.value.failure, failed.value.why, parts


@pytest.mark.spec("J5")
@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (hangs(), "timeout"),
        (forever(b"x-more: a\r\n", OK), "protocol"),
        (forever(b"HTTP/1.1 103 Early Hints\r\n\r\n"), "timeout"),
        (says(JSON + b"x-long: " + b"a" * 20_000 + b"\r\n\r\n{}"), "protocol"),
        (hangs(JSON + b"content-length: 9\r\n\r\n{"), "timeout"),
        (drips, "timeout"),
        (forever(b" " * 1_000, JSON + b"\r\n"), "size"),
        (says(JSON + b"content-length: 99\r\n\r\n{"), "broken"),
        (resets(JSON + b"content-length: 99\r\n\r\n{"), "broken"),
        (resets(b""), "broken"),
        (says(), "broken"),
        (says(b"no HTTP at all\r\n\r\n"), "protocol"),
        (says(JSON + b"\r\n" + b"[" * 4_000), "protocol"),
        (says(JSON + b"\r\n" + b'"only text"'), "protocol"),
        (says(OK + b"text/html\r\n\r\n<html>"), "protocol"),
        (says(JSON + b"content-encoding: gzip\r\n\r\n\x1f\x8b"), "protocol"),
        (says(SSE + b"\r\n" + EVENT), "protocol"),
        *((says(JSON + b"\r\n" + body), "form") for body in NO_CHATS),
        (says(b"HTTP/1.1 500 no\r\ncontent-length: 0\r\n\r\n"), "server"),
        (says(b"HTTP/1.1 429 no\r\nretry-after: 7\r\ncontent-length: 0\r\n\r\n"), "limited"),
    ],
)
async def test_an_answer_that_is_none_ends_within_its_bounds(answer: Answer, kind: str) -> None:
    book = CountingBook()
    async with raw_remote(answer) as port:
        async with asyncio.timeout(60):
            outcome, _, parts = await failure(port, book=book)
    assert (outcome, parts) == (kind, [])
    (end,) = book.ends
    assert end.outcome == kind and end.answer_bytes <= QUICK["answer_bytes"] + 1


@pytest.mark.spec("J5")
@pytest.mark.parametrize(
    ("answer", "kind", "has_begun"),
    [
        (forever(EVENT, SSE + b"\r\n"), "size", True),
        (forever(b": a comment\n\n", SSE + b"\r\n"), "size", False),
        (forever(b"a", SSE + b"\r\ndata: "), "size", False),
        (hangs(SSE + b"\r\n" + EVENT), "timeout", True),
        (says(SSE + b"\r\n" + EVENT), "broken", True),
        (resets(SSE + b"\r\n" + EVENT), "broken", True),
        (says(SSE + b'\r\ndata: {"error": {"message": "sk-theirs"}}\n\n'), "server", False),
        (says(SSE + b"\r\ndata: <script>\n\n"), "protocol", False),
        (says(SSE + b"\r\n" + EVENT + b"data: [[[\n\n"), "protocol", True),
        *(
            (says(SSE + b"\r\n" + EVENT + b"data: " + event + b"\n\n"), "form", True)
            for event in NO_EVENTS
        ),
    ],
)
async def test_a_stream_that_breaks_is_not_begun_again(
    answer: Answer, kind: str, has_begun: bool
) -> None:
    book = CountingBook()
    async with raw_remote(answer) as port:
        async with asyncio.timeout(60):
            outcome, why, parts = await failure(port, stream=True, book=book)
    assert (outcome, len(book.left_for)) == (kind, 1) and "sk-theirs" not in why
    # The remote may have made and billed the rest: it is charged as it was reserved.
    [egress], [end] = book.left_for, book.ends
    spent_count = end.prompt_tokens_count + end.answer_tokens_count
    assert (spent_count, end.money_micros) == (egress.tokens_count, egress.money_micros)
    assert bool(parts) == has_begun and end.answer_bytes <= QUICK["answer_bytes"] + 1
    assert all(isinstance(p, messages.ResponseHead) or p == EVENT for p in parts)


@pytest.mark.spec("J5", "L3")
async def test_answers_above_their_bound_take_the_remote_from_no_other_caller() -> None:
    large = CHATTED[:-1] + b', "x": "' + b"a" * (1 << 20) + b'"}'
    answers = [large, large, large, CHATTED]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await says(JSON + b"\r\n" + answers.pop(0))(reader, writer)

    async with raw_remote(answer) as port:
        remotes = Remotes(CountingBook())
        bounds = {"answer_bytes": 1 << 20}
        remotes.configure(section(f"http://127.0.0.1:{port}/v1", bounds=bounds))
        call = remotes.call(await asked(), "far-chat", CLOUD)
        for _ in range(3):
            with pytest.raises(RemoteFailed, match=f"larger than {1 << 20} bytes"):
                [part async for part in remotes.run(call)]
        other = remotes.call(await asked(), "far-chat", replace(CLOUD, tenant="other"))
        (whole,) = [part async for part in remotes.run(other)]
    await remotes.background.done()
    assert isinstance(whole, messages.FullResponse) and whole.head.status == 200


@pytest.mark.spec("J5")
async def test_no_redirect_is_followed() -> None:
    asked_for: list[bytes] = []

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked_for.append(b"asked")

    async with raw_remote(other) as there:
        for status in (b"301", b"302", b"303", b"307", b"308"):
            to = f"location: http://127.0.0.1:{there}/v1\r\n".encode() + JSON.split(b"\r\n")[1]
            to += b"\r\ncontent-length: 2\r\n\r\n{}"
            async with raw_remote(says(b"HTTP/1.1 " + status + b" there\r\n" + to)) as port:
                assert (await failure(port))[:1] == ("protocol",)
    assert asked_for == []


@pytest.mark.spec("J5")
async def test_a_remote_that_is_down_is_tried_twice_and_paid_nothing() -> None:
    book = CountingBook()
    assert (await failure(free_port(), book=book))[:2] == ("connect", "no connection could be made")
    assert (book.ends[0].prompt_tokens_count, book.ends[0].money_micros) == (0, 0)


@pytest.mark.spec("J5")
async def test_an_error_of_status_200_is_no_answer() -> None:
    body = b'{"error": {"message": "the provider is down", "code": 502}}'
    whole = JSON + b"content-length: " + str(len(body)).encode() + b"\r\n\r\n" + body
    book = CountingBook()
    async with raw_remote(says(whole)) as port:
        failed = await failure(port, book=book)
    assert failed == ("server", "its answer is an error of status 200", [])
    assert book.ends[0].answer_tokens_count <= len(body), "what came is paid, not what was reserved"


# -- TLS -------------------------------------------------------------------------------------------


@asynccontextmanager
async def https(name: str, ca: trustme.CA) -> AsyncIterator[int]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert(name).configure_cert(context)
    async with raw_remote(says(JSON + b"\r\n" + CHATTED), context) as port:
        yield port


@pytest.mark.spec("J5")
async def test_a_handshake_that_never_ends_is_no_connection() -> None:
    async with raw_remote(hangs()) as port:
        bounds = QUICK | {"connect_s": 0.2, "head_s": 5.0, "total_s": 5.0}
        failed = await failure(port, url=f"https://127.0.0.1:{port}/v1", bounds=bounds)
    assert failed[:2] == ("connect", "no connection was made in time")


@pytest.mark.spec("J5")
async def test_a_certificate_counts_for_its_name_and_authority_only(tmp_path: Any) -> None:
    ours, theirs = trustme.CA(), trustme.CA()
    ca_file = tmp_path / "ca.pem"
    ours.cert_pem.write_to_path(ca_file)
    trusted = {"ca_file": str(ca_file)}
    for name, ca in (("127.0.0.1", theirs), ("elsewhere.example", ours)):
        async with https(name, ca) as port:
            url = f"https://127.0.0.1:{port}/v1"
            outcome, why, _ = await failure(port, url=url, **trusted)
            assert (outcome, why) == ("certificate", "its certificate is not valid for its name")
            assert (await failure(port, url=url))[0] == "certificate"  # nor to the system
    async with https("127.0.0.1", ours) as port:
        remotes = Remotes(CountingBook())
        remotes.configure(section(f"https://127.0.0.1:{port}/v1", **trusted))
        parts = remotes.run(remotes.call(await asked(), "far-chat", CLOUD))
        assert isinstance(await anext(parts), messages.FullResponse)
        await parts.aclose()


# -- names that change their addresses -------------------------------------------------------------


class Names(asyncio.DatagramProtocol):
    """A DNS server that gives the next of its answers to each question, and keeps the last."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers, self.questions = list(answers), 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        question = dns.message.from_wire(data)
        answer = dns.message.make_response(question)
        addresses = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.questions += 1
        name = question.question[0].name
        answer.answer.append(dns.rrset.from_text_list(name, 0, "IN", "A", addresses))
        self.transport.sendto(answer.to_wire(), addr)


class Resolver(aiohttp.abc.AbstractResolver):
    """Asks one DNS server of loopback over UDP."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_INET) -> Any:
        import dns.asyncquery

        question = dns.message.make_query(host, "A")
        answer = await dns.asyncquery.udp(question, "127.0.0.1", port=self._port, timeout=5)
        inet = {"family": socket.AF_INET, "proto": 0, "flags": socket.AI_NUMERICHOST}
        return [
            {"hostname": host, "host": row.address, "port": port, **inet}
            for rrset in answer.answer
            for row in rrset
        ]

    async def close(self) -> None:
        """Holds nothing."""


@asynccontextmanager
async def named(*answers: list[str]) -> AsyncIterator[tuple[Names, Callable[[], Resolver]]]:
    loop = asyncio.get_running_loop()
    transport, names = await loop.create_datagram_endpoint(
        lambda: Names(*answers), local_addr=("127.0.0.1", 0)
    )
    port = transport.get_extra_info("sockname")[1]
    try:
        yield names, lambda: Resolver(port)
    finally:
        transport.close()


REFUSED = ("connect", "its name has an address that is not allowed")


@pytest.mark.spec("J5", "L2")
@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.7", "169.254.169.254", "0.0.0.0"])
async def test_a_name_of_a_private_address_is_not_connected_to(address: str) -> None:
    heard: list[bytes] = []

    async def hears(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(b"asked")

    async with raw_remote(hears) as port, named([address]) as (_, resolver):
        row = {"url": f"https://localhost:{port}/v1", "private_addresses": False}
        assert (await failure(port, resolver=resolver, **row))[:2] == REFUSED
    assert heard == []


@pytest.mark.spec("J5", "L2")
async def test_a_name_that_changes_its_address_between_two_requests_gains_nothing() -> None:
    body = JSON + b"\r\n" + CHATTED
    async with raw_remote(says(body)) as port:
        async with named(["127.0.0.1"], ["169.254.169.254"]) as (names, resolver):
            remotes = Remotes(CountingBook(), resolver)
            remotes.configure(section(f"http://localhost:{port}/v1"))  # loopback is allowed
            call = remotes.call(await asked(), "far-chat", CLOUD)
            async with aclosing(remotes.run(call)) as parts:
                assert isinstance(await anext(parts), messages.FullResponse)
            with pytest.raises(RemoteFailed, match="not allowed"):
                await anext(remotes.run(call))
            assert names.questions == 3  # nothing is remembered: once, and two tries
            await remotes.background.done()


async def test_of_several_addresses_only_the_allowed_are_connected_to() -> None:
    body = JSON + b"\r\n" + CHATTED
    async with raw_remote(says(body)) as port:
        async with named(["169.254.169.254", "127.0.0.1"]) as (_, resolver):
            remotes = Remotes(CountingBook(), resolver)
            remotes.configure(section(f"http://localhost:{port}/v1"))
            call = remotes.call(await asked(), "far-chat", CLOUD)
            async with aclosing(remotes.run(call)) as parts:
                assert isinstance(await anext(parts), messages.FullResponse)
            await remotes.background.done()


@pytest.mark.spec("J5")
async def test_proxies_of_the_environment_see_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    body = JSON + b"\r\n" + CHATTED
    async with raw_remote(says(body)) as port, raw_remote(hangs()) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy}")
        remotes = Remotes(CountingBook())
        remotes.configure(section(f"http://127.0.0.1:{port}/v1", bounds=QUICK))
        call = remotes.call(await asked(), "far-chat", CLOUD)
        async with aclosing(remotes.run(call)) as parts:
            assert isinstance(await anext(parts), messages.FullResponse)
        await remotes.background.done()
