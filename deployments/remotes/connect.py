"""Connections to remotes: one for each request, to a checked address, without a redirect.

What could carry something from one request to another, or out of the table, is off: cookies,
proxies and passwords from the environment, connections kept open, compressed answers.
"""

import os
import ssl
from functools import lru_cache
from pathlib import Path

import aiohttp

from deployments.config.checked_sockets import private_socket, public_socket
from deployments.config.remotes_section import RemoteConfig

AGENT = "serve-arbiter"  # without a version, which would say what to try on it
HEAD_LINE_BYTES = 8_190  # aiohttp's default for a line of an answer's head, and for its fields
MAX_KEY_BYTES = 8_192


class KeyUnusable(Exception):
    """The text has no part of the key."""


def session(
    row: RemoteConfig, resolver: aiohttp.abc.AbstractResolver | None = None
) -> aiohttp.ClientSession:
    """A client session for one request. `resolver`: None: the system's. Raises OSError for a
    `ca_file` that cannot be read."""
    connector = aiohttp.TCPConnector(
        ssl=_tls(row.ca_file),
        resolver=resolver,
        use_dns_cache=False,
        force_close=True,
        socket_factory=private_socket if row.private_addresses else public_socket,
    )
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=row.bounds.total_s, connect=row.bounds.connect_s),
        auto_decompress=False,
        trust_env=False,
        max_line_size=HEAD_LINE_BYTES,
        max_field_size=HEAD_LINE_BYTES,
    )


def headers(row: RemoteConfig, *, is_stream: bool) -> dict[str, str]:
    """All that a request has, but for its length and host. Raises KeyUnusable."""
    fields = {
        "content-type": "application/json",
        "accept": "text/event-stream" if is_stream else "application/json",
        "accept-encoding": "identity",
        "user-agent": AGENT,
    }
    key = key_of(row)
    return fields | ({"authorization": f"Bearer {key}"} if key else {})


def key_of(row: RemoteConfig) -> str | None:
    """Returns the key of a remote, read anew each time, so that a key can be replaced. Raises
    KeyUnusable."""
    if row.key_env:
        key = os.environ.get(row.key_env, "")
        if not key:
            raise KeyUnusable(f"the variable {row.key_env} is not set in the front's environment")
        return _checked(key, row.key_env)
    return _checked(_read(Path(row.key_file)), row.key_file) if row.key_file else None


def _read(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise KeyUnusable(f"{path} must be yours and of mode 0600; `chmod 600 {path}`")
            return stream.read(MAX_KEY_BYTES).decode("ascii", errors="replace")
    except OSError as error:
        raise KeyUnusable(f"{path}: {error.strerror}") from error


def _checked(key: str, where: str) -> str:
    """It becomes part of a header."""
    stripped = key.strip()
    if not stripped or not (stripped.isascii() and stripped.isprintable()) or " " in stripped:
        raise KeyUnusable(f"{where} has no key of one line")
    return stripped


@lru_cache(maxsize=64)
def _tls(ca_file: str | None) -> ssl.SSLContext:
    """Verifies certificate and name. Raises OSError."""
    return ssl.create_default_context(cafile=ca_file)
