"""What httpx takes from the environment: a key for this machine goes to no proxy that it names."""

from typing import Any
from urllib.parse import urlsplit

from arbiter.loopback import is_loopback


def httpx_options(url: str) -> dict[str, Any]:
    """The arguments of httpx for this address."""
    import httpx  # here, because the command line is to start without it

    parts = urlsplit(url)
    return {
        "trust_env": not is_loopback(parts.hostname or ""),
        # With `trust_env` off httpx would read neither proxies nor SSL_CERT_FILE and SSL_CERT_DIR,
        # which a context that is made here reads.
        "verify": httpx.create_ssl_context() if parts.scheme == "https" else True,
    }
