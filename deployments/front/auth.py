"""The gate every request of the front passes: may this browser ask at all, and what may this key?

What a client may write as it likes decides nothing: neither its address nor X-Forwarded-For. `Host`
and `Origin` are checked because a browser sets them itself: a web page that points a name of its
own at this machine, or posts across sites, is not what the user meant. An address as `Host` is
good, for nobody can point a name at it that is not there.

A route asks `gate.require(request, Scope.LEASE)`, which returns who asks, or raises Denied.
"""

import ipaddress

from fastapi import Request
from fastapi.responses import Response

from deployments import messages
from deployments.front.keys import (
    DEFAULT_TENANT,
    OPEN_SCOPES,
    Caller,
    Keyring,
    KeysBroken,
    Scope,
)


class Denied(Exception):
    """A request that goes no further; carries its 401, 403 or 503."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(status, code, message)
        kind = "server_error" if status >= 500 else "invalid_request_error"
        body = messages.error_body(message, kind=kind, code=code)
        headers = {"content-type": "application/json"}
        if status == 401:
            headers["www-authenticate"] = "Bearer"
        self.response = Response(body, status, headers)


class Authenticator:
    """What it knows is replaced as a whole when the configuration changes."""

    def __init__(
        self,
        keyring: Keyring,
        hosts: frozenset[str] = frozenset(),
        origins: frozenset[str] = frozenset(),
    ) -> None:
        self._keyring, self._hosts, self._origins = keyring, hosts | {"localhost"}, origins

    def check_site(self, request: Request) -> None:
        """Raises Denied for a `Host` that is not ours and an `Origin` that is another site's."""
        host = request.headers.get("host", "")
        if not ({host_name(host), "*"} & self._hosts or is_address(host_name(host))):
            raise Denied(403, "host_not_allowed", f"Host {host!r} is not in `front.hosts`")
        origin = request.headers.get("origin")
        if origin is None or origin in self._origins:
            return
        _, _, site = origin.partition("://")
        if site != host:
            raise Denied(403, "origin_not_allowed", f"Origin {origin!r} is not in `front.origins`")

    def require(self, request: Request, scope: Scope) -> Caller:
        """Raises Denied: 401 without a key that is known, 403 with one that lacks the scope."""
        token = _token(request)
        try:
            caller = self._keyring.caller(token) if token else None
            is_open = caller is None and scope in OPEN_SCOPES and self._keyring.is_open
        except KeysBroken as error:
            raise Denied(503, "keys_unreadable", "the file of API keys cannot be read") from error
        if is_open:
            return Caller(DEFAULT_TENANT, OPEN_SCOPES)
        if caller is None:
            said = "no such API key" if token else "this needs an API key (Authorization: Bearer)"
            raise Denied(401, "invalid_api_key", f"{said}; `arbiter key add` makes one")
        if scope not in caller.scopes:
            message = f"key {caller.key_id} lacks the scope `{scope}`"
            raise Denied(403, "scope_missing", message)
        return caller


def host_name(host: str) -> str:
    """A Host header without its port, in lower case."""
    name, _, port = host.rpartition(":")
    return (name if name and port.isdecimal() else host).lower()


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _token(request: Request) -> str:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""
