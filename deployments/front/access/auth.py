"""Authenticator: may this browser send requests at all, and what may this key do?

What a client can write freely decides nothing: neither its address nor X-Forwarded-For. `Host` and
`Origin` are checked because a browser sets them itself: a web page that points a name of its own at
this machine, or posts across sites, does not act for the user. An address as `Host` is allowed,
because no attacker can point a name at an address that is not in the request.

A route declares what it needs: `caller: Annotated[Caller, Depends(Require(Scope.LEASE))]`
(deployments.front.dependencies).
"""

import ipaddress

from starlette.requests import Request

from arbiter.errors import RequestError
from arbiter.units import DEFAULT_TENANT
from deployments.front.access.keys import (
    OPEN_SCOPES,
    Caller,
    Keyring,
    KeysBroken,
    Scope,
)


class Denied(RequestError):
    """A request that its key, Host or Origin does not allow: 401, 403 or 503."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(status, code, message)
        self.status_code, self.code, self.message = status, code, message

    def __str__(self) -> str:
        return self.message


class Authenticator:
    """Replaced as a whole when the configuration changes."""

    def __init__(
        self,
        keyring: Keyring,
        hosts: frozenset[str] = frozenset(),
        origins: frozenset[str] = frozenset(),
    ) -> None:
        self._keyring, self._hosts, self.origins = keyring, hosts | {"localhost"}, origins

    @property
    def has_tenants(self) -> bool:
        """Whether several tenants have keys; False also where the keys cannot be read, with which
        no request comes this far."""
        try:
            return self._keyring.tenants_count > 1
        except KeysBroken:
            return False

    def check_site(self, request: Request) -> None:
        """Raises Denied for a `Host` that is not ours and an `Origin` that is another site's."""
        host = request.headers.get("host", "")
        if not ({host_name(host), "*"} & self._hosts or is_address(host_name(host))):
            raise Denied(403, "host_not_allowed", f"Host {host!r} is not in `front.hosts`")
        origin = request.headers.get("origin")
        if origin is None or origin in self.origins:
            return
        _, _, site = origin.partition("://")
        if site != host:
            raise Denied(403, "origin_not_allowed", f"Origin {origin!r} is not in `front.origins`")

    def require(self, request: Request, scope: Scope) -> Caller:
        """Raises Denied: 401 without a known key, 403 with a key that lacks the scope."""
        token = _token(request)
        try:
            caller = self._keyring.caller(token) if token else None
            is_open = caller is None and scope in OPEN_SCOPES and self._keyring.is_open
        except KeysBroken as error:
            refusal = "the file of API keys cannot be read; repair it (`front.keys_file`)"
            raise Denied(503, "keys_unreadable", refusal) from error
        if is_open:
            return Caller(DEFAULT_TENANT, OPEN_SCOPES)
        if caller is None:
            refusal = (
                "no such API key" if token else "this needs an API key (Authorization: Bearer)"
            )
            raise Denied(401, "invalid_api_key", f"{refusal}; `arbiter key add` makes one")
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
    """Returns the key of a request, as OpenAI's clients send it or as Anthropic's do."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    bearer = token.strip() if kind.lower() == "bearer" else ""
    return bearer or request.headers.get("x-api-key", "").strip()
