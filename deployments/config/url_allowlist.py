"""From where things may be fetched: allow-lists of URLs, and which addresses are public. Opens
nothing and resolves nothing.
"""

import ipaddress
import re
from collections.abc import Sequence

# What stands in a URL of ours. No `%`, `?`, `#` or `\` that a server could read in another way than
# the allow-list does, and no `::`, by which fsspec chains file systems.
_URL = re.compile(r"[a-z][a-z0-9+.-]{0,15}://[A-Za-z0-9._:-]*(/[A-Za-z0-9._~@=+-]+)*/?")


def is_prefix(text: str) -> bool:
    """Fit for an allow-list: a whole folder, for `s3://ours` would allow `s3://ours-too` too."""
    return text.endswith("/") and _is_plain(text)


def is_allowed(url: str, prefixes: Sequence[str]) -> bool:
    return _is_plain(url) and any(url.startswith(prefix) for prefix in prefixes)


def _is_plain(url: str) -> bool:
    return bool(_URL.fullmatch(url)) and ".." not in url.split("/") and "." not in url.split("/")


def is_public(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    inner = getattr(found, "ipv4_mapped", None) or found
    return bool(inner.is_global) and not inner.is_multicast
