"""The front's application over a service of jobs, both in this process."""

import json
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

from deployments.front import application
from deployments.front.access.auth import Authenticator
from deployments.front.access.keys import Keyring
from deployments.front.dependencies import FrontState
from deployments.jobs.client import JobsClient
from deployments.jobs.errors import StorageFull
from deployments.jobs.service import JobsService
from tests.support.jobs import CHAT, Capability, chat, jobs_service, table


class Front:
    """The front's application over a service of jobs in this process."""

    def __init__(self, folder: Path) -> None:
        self.capability = Capability()
        self.service: JobsService = jobs_service(folder, self.capability)
        self.full: str | None = None  # a method that finds the disk full
        self.keys = folder / "keys.json"
        self.state = state = FrontState(0, auth=Authenticator(Keyring(self.keys)))
        plain = table()
        arbiter = plain.arbiter.model_copy(update={"state_file": str(folder / "arbiter.sqlite")})
        state.service.configure(plain.model_copy(update={"arbiter": arbiter}))
        state.jobs = JobsClient(self._send)
        self._app = application.build(state)

    async def _send(self, method: str, *args: Any) -> Any:
        if method == self.full:
            raise StorageFull("/state", "no space left on device")
        return await getattr(self.service, method)(*args)

    def http(self, key: str = "none") -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"} if key != "none" else {}
        transport = httpx.ASGITransport(self._app)
        return httpx.AsyncClient(
            transport=transport, base_url="http://localhost/v1", headers=headers
        )

    def client(self, key: str = "none") -> AsyncOpenAI:
        http: Any = self.http()  # of httpx, whichever the client is typed for
        return AsyncOpenAI(base_url="http://localhost/v1", api_key=key, http_client=http)


def lines(*names: str) -> bytes:
    rows = [
        {"custom_id": name, "method": "POST", "url": CHAT, "body": chat(name)} for name in names
    ]
    return "\n".join(json.dumps(row) for row in rows).encode()
