"""Adapters behind a URL: from an allow-list to a folder of this node, by fsspec.

The model's configuration says from where: `adapters.urls` lists prefixes (`s3://our-loras/`,
`hf://our-org/`, `https://models.example.com/loras/`), none by default. Only files with the form of
an adapter's are kept: a page in place of one is a failed fetch, whatever its status.
They are trusted no more than a folder that a tenant dropped: an engine copies, hashes and
checks them in the same way (deployments.adapters.store).

    fetcher = Fetcher(folder, bounds)
    await fetcher.bring(entry)      # entry.path is there now

Where a bucket or a hub is, and as whom it is asked, the file system reads from the environment of
the replica, as its own documentation has it: AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and the like,
HF_ENDPOINT and HF_TOKEN.
"""

import asyncio
import contextlib
import os
import shutil
import textwrap
import time
import traceback
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arbiter.errors import RequestError
from deployments.adapters.folder_cache import alone, make_room, remove_abandoned
from deployments.adapters.safe_files import AdapterInvalid
from deployments.adapters.validate import check_form
from deployments.config.checked_sockets import public_socket

if TYPE_CHECKING:
    import aiohttp

    from deployments.adapters.catalogue import CatalogueEntry


_CHUNK_BYTES = 1 << 20
# Read from a bucket at a time: s3fs would by default read 50 MiB, more than a file may have.
_BLOCK_BYTES = 8 << 20
# Kept of fetched adapters on a node, beside the copies that engines serve; beyond it the folders
# longest unused are removed.
MAX_FETCHED_BYTES = 16 << 30
# A gigabyte at 2 MB/s; the request that waits for the adapter has a deadline of its own.
FETCH_S = 600.0
CONNECT_S = 10.0
FETCHES = 4  # at a time for the adapters of one model
_SCRATCH = ".fetching-"
_TOLD_CHARS = 500  # of a server's message, which clients are told
_CAUSES = 9  # the longest chain of causes that is looked at; an error of s3fs has three

_MISSING = "upload the adapter's files, or correct its URL in remote.json"
_AWAY = "see whether its server is up; a later request tries again"
# What to do, by the name of an error's class or of a base of it: not every library is there to ask
# for the class itself.
_ADVICE = {
    "OfflineModeIsEnabled": "start the system with HF_HUB_OFFLINE=0; `make serve` sets it to 1",
    "ImportError": "install it in the environment of the cluster",
    "FileNotFoundError": _MISSING,
    "RemoteEntryNotFoundError": _MISSING,  # a hub's
    "PermissionError": "check the credentials in the environment in which the cluster was started",
    "HfHubHTTPError": "see what the hub says; a token is HF_TOKEN of the cluster's environment",
    "NoCredentialsError": "set the credentials in the environment in which the cluster is started",
    "TimeoutError": _AWAY,
    "ConnectionError": _AWAY,
    "HTTPClientError": _AWAY,  # botocore's
    "TransportError": _AWAY,  # httpx's, as the hub's client has it
}


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
        # By the path to fill, so that many requests for a new adapter have it fetched once.
        self._fetching: dict[Path, asyncio.Task[None]] = {}
        self._places = asyncio.Semaphore(FETCHES)

    async def bring(self, entry: "CatalogueEntry") -> None:
        """Returns once the entry's path exists. Raises FetchFailed."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(entry.path)  # the time of use, by which the longest unused are removed
            return
        fetch = self._fetching.get(entry.path)
        if fetch is None:
            fetch = self._fetching[entry.path] = asyncio.create_task(self._fetch(entry))
            fetch.add_done_callback(partial(self._end, entry.path))
        # Shielded, so that the fetch goes on for other requests where this one is cancelled.
        await asyncio.shield(fetch)

    def _end(self, path: Path, fetch: "asyncio.Task[None]") -> None:
        del self._fetching[path]
        if not fetch.cancelled():
            fetch.exception()  # asyncio logs an exception that is never read

    async def _fetch(self, entry: "CatalogueEntry") -> None:
        """Raises FetchFailed, whatever the library of the URL's scheme raises."""
        scratch = self._folder / f"{_SCRATCH}{uuid.uuid4().hex}"
        async with self._places:
            # A thread for each fetch, because some libraries wait for ever, as huggingface_hub does
            # for a listing: then the thread is left behind.
            thread = ThreadPoolExecutor(1, "adapter-fetch")
            work = thread.submit(self._fill, entry, scratch, time.monotonic() + FETCH_S)
            work.add_done_callback(_free_frames)
            thread.shutdown(wait=False)
            filled = asyncio.wrap_future(work)
            await asyncio.wait({filled}, timeout=FETCH_S)
        if not filled.done():
            filled.cancel()
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
            late = f"{entry.url} was not read within {FETCH_S:g} s; {_ADVICE['TimeoutError']}"
            raise FetchFailed(entry.full_name, late)
        if error := filled.exception():
            raise FetchFailed(entry.full_name, _in_words(error)) from error

    def _fill(self, entry: "CatalogueEntry", scratch: Path, until_s: float) -> None:
        """Makes the entry's path. Raises what a file system of fsspec does, OSError, ValueError
        beyond a bound or for what is no adapter, TimeoutError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch.mkdir(mode=0o700)
        try:
            size_bytes = self._copy(entry.url, scratch, until_s)
            _refuse_page(scratch)
            with alone(self._folder):
                remove_abandoned(self._folder, _SCRATCH, 2 * FETCH_S)
                make_room(self._folder, size_bytes, MAX_FETCHED_BYTES)
                if not entry.path.is_dir():
                    entry.path.parent.mkdir(mode=0o700, exist_ok=True)
                    scratch.rename(entry.path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _copy(self, url: str, scratch: Path, until_s: float) -> int:
        """Bytes copied."""
        import fsspec

        scheme = url.partition("://")[0]
        is_http = scheme in ("http", "https")
        # Made anew, because a file system remembers what it did not find, and as whom it asked.
        system = fsspec.filesystem(scheme, skip_instance_cache=True, **_options(scheme))
        root = url if is_http else system._strip_protocol(url)
        total_bytes = 0
        for name, most_bytes in self._bounds.items():
            with system.open(f"{root.rstrip('/')}/{name}", "rb", **_reading(scheme)) as reader:
                total_bytes += _bounded(reader, scratch / name, most_bytes, until_s)
        return total_bytes


def _free_frames(work: "Future[None]") -> None:
    """Frees the frames of the error in the thread of the fetch. They refer to the file system,
    which closes its connections when it is freed: otherwise that would happen in the replica's
    event loop, where the error is freed."""
    error = None if work.cancelled() else work.exception()
    for _ in range(_CAUSES):
        if error is None:
            return
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _bounded(reader: Any, target: Path, most_bytes: int, until_s: float) -> int:
    remaining_bytes = most_bytes
    with target.open("xb") as writer:
        while chunk := reader.read(_CHUNK_BYTES):
            remaining_bytes -= len(chunk)
            if remaining_bytes < 0:
                most = f"{most_bytes} bytes, the most for an adapter of this model's `max_rank`"
                raise ValueError(f"{target.name} is larger than {most}")
            if time.monotonic() > until_s:
                raise TimeoutError(f"{target.name} was not read within {FETCH_S:g} s")
            writer.write(chunk)
    return most_bytes - remaining_bytes


def _refuse_page(scratch: Path) -> None:
    """Refuses what is no adapter at all: an error page that was sent with status 200 would be kept,
    and its adapter fail for as long as it is asked for. Raises ValueError, OSError."""
    try:
        check_form("", scratch)
    except AdapterInvalid as error:
        what = f"the files that came are no adapter's: {error.reason}"
        raise ValueError(f"{what}; see what its URL in remote.json answers") from error


def _in_words(error: BaseException) -> str:
    """What happened, in one line, and what to do about it."""
    names = [kind.__name__ for kind in type(error).__mro__]
    what = textwrap.shorten(f"{names[0]}: {error}", _TOLD_CHARS).rstrip(" .:")
    advice = next((_ADVICE[name] for name in names if name in _ADVICE), "")
    return f"{what}; {advice}" if advice else what


def _options(scheme: str) -> dict[str, Any]:
    """Returns options for the file system, over what fsspec's own configuration says."""
    if scheme in ("http", "https"):
        return {"get_client": _client, "allow_redirects": False}
    if scheme in ("s3", "s3a"):
        import fsspec.config

        # s3fs tries five times, and botocore would five times in each: minutes for a server that
        # is gone. s3fs bounds each by 5 s for the connection and 15 s without a byte.
        usual = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
        return {"config_kwargs": {"retries": {"total_max_attempts": 1}, **usual}}
    return {}


def _reading(scheme: str) -> dict[str, Any]:
    """How a file is opened to be read once, from its beginning."""
    if scheme in ("http", "https"):
        # One request, with no question before it how large the file is.
        return {"block_size": 0, "size": 1}
    if scheme in ("s3", "s3a"):
        return {"block_size": _BLOCK_BYTES}
    return {"block_size": 0} if scheme == "hf" else {}  # 0: one request for the whole file


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
        raise_for_status=_refuse_other,
    )


async def _refuse_other(answer: "aiohttp.ClientResponse") -> None:
    """Refuses what is neither a file nor an error, which the file system takes for a file. Raises
    aiohttp.ClientResponseError."""
    import aiohttp

    if answer.status != 200 and answer.ok:
        answer.close()
        raise aiohttp.ClientResponseError(
            answer.request_info,
            answer.history,
            status=answer.status,
            message="this is no file, and no redirect is followed; name the URL of the files",
        )
