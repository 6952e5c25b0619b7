"""The real front behind a socket, with a scripted arbiter behind it and no Ray."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import uvicorn

from arbiter.errors import ArbiterUnavailable, UnknownTicket
from arbiter.units import TicketId
from deployments import messages
from deployments.config import boot, runtime_settings
from deployments.config.schema import Table, parse_table
from deployments.front import application
from deployments.front.access import keys
from deployments.front.access.auth import Authenticator
from deployments.front.access.keys import Keyring, Scope
from deployments.front.dependencies import FrontState
from deployments.front.inference.service import InferenceService
from deployments.front.routes import free, leases, plan, queue, residency, tenants
from deployments.front.status import arbiter_gateway, metrics_page
from tests.support.arbiter_states import Books, size

CALLERS = (
    arbiter_gateway,
    free,
    leases,
    metrics_page,
    plan,
    queue,
    residency,
    runtime_settings,
    tenants,
)
STARTS_S = 60.0


def table_of(folder: Path, models: list[str], adapters: int = 0) -> Table:
    """The first model takes adapters, named by a manifest of as many rows."""
    made: dict[str, Any] = {name: {"source": "x", "need": {"weights": 1}} for name in models}
    if adapters:
        home = folder / "adapters"
        home.mkdir()
        rows = {f"law-{number:05}": f"https://a/{number}/" for number in range(adapters)}
        (home / "remote.json").write_text(json.dumps(rows))
        made[models[0]]["adapters"] = {"folder": str(home), "urls": ["https://a/"], "slots": 8}
    chat = {"role": "text", "engine": "vllm", "models": made}
    return parse_table({"capabilities": {"chat": chat}})


@dataclass
class ScriptedArbiter:
    """Answers as its books and `answers` say, and counts the calls of each method."""

    books: Books = field(default_factory=Books)
    events: list[dict[str, Any]] = field(default_factory=list)
    answers: dict[str, Any] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    table: dict[str, Any] = field(default_factory=dict)
    tiers: dict[str, str] = field(default_factory=dict)  # of adapters, as an engine would say
    is_away: bool = False
    waiting: int = 0  # long polls that are open now

    def __post_init__(self) -> None:
        self._told = threading.Condition()

    def tell(self, kind: str, model: str = "", unix_s: float = 0.0, **more: Any) -> None:
        """One event, after what it tells of is in the books."""
        with self._told:
            self.books.sequence += 1
            about = {"ticket": f"{model}-1", "capability": "chat", "model": model} if model else {}
            line = {"seq": self.books.sequence, "epoch": self.books.epoch, "unix_s": unix_s}
            self.events.append({**line, "kind": kind, **about, **more})

    async def __call__(self, method: str, *args: Any, within_s: float = 0) -> Any:
        self.calls[method] += 1
        if self.is_away:
            await asyncio.sleep(0.05)
            raise ArbiterUnavailable(0.05)
        if method == "events":
            return await self._after(*args)
        if method == "state":
            return self.books.state(table=self.table)
        if method not in self.answers:
            self.asked.append((method, *args))
            return None
        if method not in ("plan", "explain"):
            self.asked.append((method, *args))
        answer = self.answers[method]
        if isinstance(answer, Exception):
            raise answer
        return answer(*args) if callable(answer) else answer

    async def engine(self, call: messages.InferenceCall) -> messages.Parts:
        """In place of a capability's replica."""
        self.calls[call.path] += 1
        body = json.dumps({"tiers": self.tiers}).encode()
        yield messages.FullResponse(messages.ResponseHead(200, {}), body)

    async def _after(self, sequence: int, wait_s: float) -> list[dict[str, Any]]:
        self.waiting += 1
        try:
            ends = asyncio.get_running_loop().time() + wait_s
            while not (later := [e for e in self.events if e["seq"] > sequence]):
                if self.is_away:
                    raise ArbiterUnavailable(0.0)
                if asyncio.get_running_loop().time() >= ends:
                    return []
                await asyncio.sleep(0.01)
            return later
        finally:
            self.waiting -= 1


def explained(ticket: str) -> dict[str, Any]:
    if ticket == "gone-1":
        raise UnknownTicket(TicketId(ticket))
    sentences = [
        f"{ticket} is resident for 12.0 s.",
        "300.0 MiB were missing on n1/gpu:0 for next.",
    ]
    return {"ticket": ticket, "sentences": sentences}


def planned(question: Any) -> dict[str, Any]:
    """As the core answers: `talk` would leave for it."""
    victim = {
        "ticket": "talk-1", "capability": "chat", "model": "talk", "state": "resident",
        "freed_bytes": {"n1/gpu:0": size(300)}, "goes": "gone", "reload_s": 4.0, "inflight": 0,
        "idle_s": 12.0, "priority": "batch", "tenant": "acme", "client": "",
    }  # fmt: skip
    return {
        "answer": "after_evicting", "capability": question.capability, "model": question.model,
        "need_bytes": question.need.device_bytes, "node": "n1", "goes_to_bytes": {},
        "victims": [victim], "wait_s": 0.0, "load_s": 2.0, "is_resident": False,
        "starts_replica": False, "code": None, "sentences": ["talk (talk-1) leaves: 300.0 MiB."],
        "stays": [],
    }  # fmt: skip


@dataclass
class ConsoleFront:
    """A front that listens, its arbiter, and its keys."""

    url: str
    arbiter: ScriptedArbiter
    state: FrontState
    keys_file: Path

    def key(self, *scopes: Scope) -> str:
        return keys.add(self.keys_file, "test", "acme", frozenset(scopes))

    @property
    def owner_key(self) -> str:
        return keys.first_key_path(self.keys_file).read_text().strip()


@contextmanager
def listening(folder: Path, table: Table) -> Iterator[ConsoleFront]:
    """The application of the front as Serve would run it, on a free port."""
    arbiter = ScriptedArbiter(answers={"explain": explained, "plan": planned})
    arbiter.table = boot.as_plain(table)
    keys_file = folder / "keys.json"
    keys.ensure_first(keys_file)
    service = InferenceService(lambda capability: arbiter.engine)
    service.configure(table)
    state = FrontState(7, Authenticator(Keyring(keys_file)), service)
    with ExitStack() as stack:
        for module in CALLERS:
            stack.enter_context(patch.object(module, "call_arbiter", arbiter))
        url = stack.enter_context(served(application.build(state)))
        yield ConsoleFront(url, arbiter, state, keys_file)


@contextmanager
def served(app: Callable[..., Any]) -> Iterator[str]:
    """An ASGI application in a thread of its own."""
    config = uvicorn.Config(app, port=0, log_level="warning", lifespan="off")
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        for _ in range(round(STARTS_S / 0.02)):
            if server.started:
                break
            thread.join(0.02)
        assert server.started, f"the front does not listen after {STARTS_S} s"
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(STARTS_S)
