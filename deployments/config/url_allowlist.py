"""Which URLs an allow-list permits, and which addresses are public. Nothing here opens a connection
or resolves a name.
"""

import ipaddress
import re
from collections.abc import Sequence

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# The characters that a URL may have. `%`, `?`, `#` and `\` are refused, because a server could read
# them in another way than the allow-list does, and `::`, because fsspec chains file systems by it.
_URL = re.compile(r"[a-z][a-z0-9+.-]{0,15}://[A-Za-z0-9._:-]*(/[A-Za-z0-9._~@=+-]+)*/?")


def is_prefix(text: str) -> bool:
    """Whether a text may stand in an allow-list. It must end with `/`, because `s3://ours` would
    allow `s3://ours-too` as well."""
    return text.endswith("/") and _is_plain(text)


def is_allowed(url: str, prefixes: Sequence[str]) -> bool:
    return _is_plain(url) and any(url.startswith(prefix) for prefix in prefixes)


def _is_plain(url: str) -> bool:
    return bool(_URL.fullmatch(url)) and ".." not in url.split("/") and "." not in url.split("/")


# RFC 6052: a gateway makes the last four bytes an address of IPv4
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether an address is public. It is not where it is a public one of IPv6 that a gateway
    translates to a private one of IPv4."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    inner = _inside(ip) if isinstance(ip, ipaddress.IPv6Address) else ip
    return all(one.is_global and not one.is_multicast for one in (inner, _unmapped(ip)))


def _unmapped(ip: Address) -> Address:
    return getattr(ip, "ipv4_mapped", None) or ip


def _inside(ip: ipaddress.IPv6Address) -> Address:
    """Returns the address of IPv4 that an address of IPv6 embeds; itself where it embeds none."""
    if ip in _NAT64:
        return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    teredo = ip.teredo
    return ip.ipv4_mapped or ip.sixtofour or (teredo[1] if teredo else ip)
