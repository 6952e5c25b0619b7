"""A hub on this machine: of the API of huggingface.co what its file system asks to read a file.

Model, revision, listing and file, with the codes and headers by which huggingface_hub tells what is
missing. Large files lie elsewhere, as on the hub: behind a redirect to another host, where no token
belongs.
https://huggingface.co/docs/hub/api
"""

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOKEN = "hf_a-token-of-our-org"
PINNED = "3f2a9c1d"  # a revision that its branch has left behind
WEIGHTS = "adapter_model.safetensors"


@dataclass
class Hub:
    """Its models by repository and revision, and what it was asked."""

    models: dict[tuple[str, str], Path]
    is_private: bool = False
    asked: list[tuple[str, str]] = field(default_factory=list)  # path, and the token or ""
    elsewhere: list[str] = field(default_factory=list)  # tokens that the store of large files got
    hangs_at: str = "none"  # a part of the paths of which no request is answered
    may_end: threading.Event = field(default_factory=threading.Event)
    port: int = 0
    store_port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, hub: Hub, *args: object) -> None:
        self.hub = hub
        super().__init__(*args)  # type: ignore[arg-type]

    @property
    def token(self) -> str:
        return self.headers.get("authorization", "").removeprefix("Bearer ")

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


class _Front(_Handler):
    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.asked.append((path, self.token))
        if self.hub.hangs_at in path:
            self.hub.may_end.wait(600)
            return
        if self.token not in ("", TOKEN):
            said = "Invalid credentials in Authorization header"
            return self.answer(401, X_Error_Message=said)
        words = path.strip("/").split("/")
        if words[:2] == ["api", "models"]:
            return self._model("/".join(words[2:4]), words[4:])
        if words[2:3] == ["resolve"]:
            return self._file("/".join(words[:2]), words[3], "/".join(words[4:]))
        self.answer(404)

    def _found(self, repo: str, revision: str) -> Path | None:
        """Has answered where it is None."""
        known = [name for name, _ in self.hub.models]
        if repo not in known or (self.hub.is_private and self.token != TOKEN):
            self.answer(404 if self.token else 401, X_Error_Code="RepoNotFound")
        elif (repo, revision) not in self.hub.models:
            self.answer(404, X_Error_Code="RevisionNotFound")
        return self.hub.models.get((repo, revision))

    def _model(self, repo: str, rest: list[str]) -> None:
        revision = rest[1] if len(rest) > 1 else "main"
        folder = self._found(repo, revision)
        if folder is None:
            return None
        if rest[:1] != ["tree"]:
            about = {"id": repo, "modelId": repo, "sha": "0" * 40, "tags": [], "siblings": []}
            return self.answer(200, json.dumps(about).encode(), content_type="application/json")
        inner = folder.joinpath(*rest[2:])
        if not inner.is_dir():
            return self.answer(404, X_Error_Code="EntryNotFound")
        rows = [
            {"type": "file", "path": str(file.relative_to(folder)), "oid": "0" * 40}
            | {"size": file.stat().st_size}
            for file in sorted(inner.iterdir())
        ]
        return self.answer(200, json.dumps(rows).encode(), content_type="application/json")

    def _file(self, repo: str, revision: str, name: str) -> None:
        folder = self._found(repo, revision)
        if folder is None:
            return None
        if not (folder / name).is_file():
            return self.answer(404, X_Error_Code="EntryNotFound", X_Error_Message="no such file")
        if name == WEIGHTS:
            where = f"http://localhost:{self.hub.store_port}{folder / name}"
            return self.answer(302, location=where)
        self.answer(200, (folder / name).read_bytes(), X_Repo_Commit="0" * 40, ETag='"0"')


class _Store(_Handler):
    def do_GET(self) -> None:
        self.hub.elsewhere.append(self.token)
        self.answer(200, Path(self.path).read_bytes())


@contextlib.contextmanager
def hub_server(models: dict[tuple[str, str], Path], port: int = 0) -> Iterator[Hub]:
    """`models`: folders by repository and revision, `main` for what a URL without one means."""
    hub = Hub(models)
    with _served(hub, _Front, port) as hub.port, _served(hub, _Store, 0) as hub.store_port:
        try:
            yield hub
        finally:
            hub.may_end.set()


@contextlib.contextmanager
def _served(hub: Hub, handler: type[_Handler], port: int) -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", port), partial(handler, hub))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
