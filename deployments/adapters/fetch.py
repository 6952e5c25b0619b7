"""Adapters behind a URL: from an allow-list to a folder of this node, by fsspec.

The model's configuration says from where: `adapters.urls` lists prefixes (`s3://our-loras/`,
`hf://our-org/`, `https://models.example.com/loras/`), none by default. Fetched files are trusted no
more than a folder that a tenant dropped: an engine copies, hashes and checks them in the same way
(deployments.adapters.store).

    fetcher = Fetcher(folder, max_bytes)
    await fetcher.bring(entry)      # entry.path is there now
"""

import asyncio
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arbiter.errors import RequestError
from deployments.adapters.folder_cache import alone, make_room
from deployments.checked_sockets import public_socket

if TYPE_CHECKING:
    from deployments.adapters.catalogue import Entry


_CHUNK_BYTES = 1 << 20
# Kept on a node beside the copies that engines serve; the folders longest unused are removed.
MAX_FETCHED_BYTES = 16 << 30
# A gigabyte at 2 MB/s; the request that waits for the adapter has a deadline of its own.
FETCH_S = 600.0
CONNECT_S = 10.0


class FetchFailed(RequestError):
    """The source did not deliver the adapter; a later try may succeed."""

    status_code, code, retry_after_s = 502, "adapter_not_fetched", 10.0

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"adapter {self.name!r} could not be fetched: {self.reason}"


class Fetcher:
    """Fetches the adapters of one model. Several processes of a node may share the folder."""

    def __init__(self, folder: Path, bounds: dict[str, int]) -> None:
        """`bounds`: the files of an adapter to their most bytes."""
        self._folder, self._bounds = folder, bounds
        # So that many requests for a new adapter have it fetched once.
        self._fetching: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def bring(self, entry: "Entry") -> None:
        """Returns once the entry's path exists. Raises FetchFailed."""
        if entry.path.is_dir():
            return
        async with self._fetching[entry.url]:
            if not entry.path.is_dir():
                await asyncio.to_thread(self._fetch, entry)
        self._fetching.pop(entry.url, None)

    def _fetch(self, entry: "Entry") -> None:
        import aiohttp  # what fsspec raises of its own HTTP, and imported by then

        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=self._folder, prefix=".fetching-"))
        try:
            size_bytes = self._copy(entry.url, scratch)
            with alone(self._folder):
                make_room(self._folder, size_bytes, MAX_FETCHED_BYTES)
                if not entry.path.is_dir():
                    entry.path.parent.mkdir(mode=0o700, exist_ok=True)
                    scratch.rename(entry.path)
        except (OSError, ValueError, ImportError, aiohttp.ClientError, TimeoutError) as error:
            raise FetchFailed(entry.full_name, f"{type(error).__name__}: {error}") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _copy(self, url: str, scratch: Path) -> int:
        """Bytes copied. Raises what a file system of fsspec does, and ValueError beyond a bound."""
        import fsspec

        scheme = url.partition("://")[0]
        is_http = scheme in ("http", "https")
        system = fsspec.filesystem(scheme, **(_http_options() if is_http else {}))
        root = url if is_http else system._strip_protocol(url)
        total_bytes = 0
        for name, most_bytes in self._bounds.items():
            # One request, with no question before it how large the file is.
            how: dict[str, Any] = {"block_size": 0, "size": 1} if is_http else {}
            with system.open(f"{root.rstrip('/')}/{name}", "rb", **how) as reader:
                total_bytes += _bounded(reader, scratch / name, most_bytes)
        return total_bytes


def _bounded(reader: Any, target: Path, most_bytes: int) -> int:
    left = most_bytes
    with target.open("xb") as writer:
        while chunk := reader.read(_CHUNK_BYTES):
            left -= len(chunk)
            if left < 0:
                raise ValueError(f"{target.name} is larger than {most_bytes} bytes")
            writer.write(chunk)
    return most_bytes - left


def _http_options() -> dict[str, Any]:
    return {"get_client": _client, "allow_redirects": False, "skip_instance_cache": True}


async def _client(**how: Any) -> Any:
    """A session that connects to public addresses only, whatever a name resolves to at that moment
    and however an address is written, and unpacks nothing."""
    import aiohttp

    connector = aiohttp.TCPConnector(socket_factory=public_socket)
    timeout = aiohttp.ClientTimeout(total=FETCH_S, sock_connect=CONNECT_S)
    return aiohttp.ClientSession(
        connector=connector,
        timeout=timeout,
        headers={"accept-encoding": "identity"},
        auto_decompress=False,
    )
