"""A remote on loopback, and the Remotes that may ask it."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from deployments.config.remotes_section import RemotesConfig
from deployments.front.access.keys import Caller, Scope
from deployments.front.inference.request import ParsedRequest, parse
from deployments.remotes.remotes import Remotes
from tests.support.remote_server import CountingBook, GoodRemote, good_remote

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
KEY = "remote-key-of-the-operator"
CLOUD = Caller("default", frozenset({Scope.INFER, Scope.CLOUD}))


def section(url: str, **more: Any) -> RemotesConfig:
    """A table with one remote, `cloud`, and its model `far-chat`; `more`: of the remote's row."""
    model = {"name": "their-chat", "prompt_price": 2.0, "answer_price": 10.0}
    model["answer_tokens"] = 100
    row = {"url": url, "models": {"far-chat": model}, "key_env": "THEIR_KEY"}
    row |= {"private_addresses": True, "budget": {"tokens": 10_000}}
    return RemotesConfig.model_validate(
        {"hosts": ["127.0.0.1", "localhost"], "rows": {"cloud": row | more}}
    )


async def asked(
    headers: dict[str, str] | None = None, path: str = CHAT, **more: Any
) -> ParsedRequest:
    body = {"model": "far-chat", "messages": HELLO} | more
    return await parse(path, json.dumps(body).encode(), headers or {}, {})


@pytest.fixture
async def remote() -> AsyncIterator[GoodRemote]:
    async with good_remote() as running:
        yield running


@pytest.fixture
def book() -> CountingBook:
    return CountingBook()


@pytest.fixture
def remotes(remote: GoodRemote, book: CountingBook, monkeypatch: pytest.MonkeyPatch) -> Remotes:
    monkeypatch.setenv("THEIR_KEY", KEY)
    made = Remotes(book)
    made.configure(section(remote.url))
    return made
