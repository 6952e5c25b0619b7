"""The front over HTTP. Every failure is a CommandError that says what failed and what to do."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from arbiter.leases import URL
from arbiter.loopback import is_loopback
from deployments.cli.output import CommandError, clean
from deployments.config.proxy_trust import httpx_options

if TYPE_CHECKING:
    import httpx

CONNECT_S = 5.0  # two lost SYNs on Linux, which sends them after 1 s and 3 s again
ANSWER_S = 30.0  # twice the longest silence of the event stream
# A front that has answered before may be restarting: on a busy machine it is back within a minute.
RETURNS_S, AGAIN_S = 120.0, 1.0
SHOWN_CHARS_MOST = 500  # characters quoted of an answer that is not the front's

Url = Annotated[
    str | None,
    typer.Option("--url", envvar="ARBITER_URL", help=f"The front. Default: {URL}."),
]


class NoFront(CommandError):
    """Nothing that answers, at an address where the front was expected."""

    def __init__(self, url: str, cause: str) -> None:
        super().__init__(url, cause)
        self.url, self.cause = url, cause

    def __str__(self) -> str:
        return (
            f"no front answers at {self.url} ({self.cause}). Start it (`make serve`, or"
            " `serve run serve_config.yaml`), or name another by --url or ARBITER_URL"
        )


class BadUrl(CommandError):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.url = url

    def __str__(self) -> str:
        return f"{self.url!r} is no address of a front; write it as http://HOST:PORT"


class NoJson(CommandError):
    """A value that no request can carry."""

    def __init__(self, what: str, cause: str) -> None:
        super().__init__(what, cause)
        self.what, self.cause = what, cause

    def __str__(self) -> str:
        return (
            f"{self.what} is no JSON value ({self.cause}); write numbers that are finite, and"
            " a date as text, in quotes"
        )


def check_json(what: str, value: object) -> None:
    """Raises NoJson where a request cannot carry the value. `what`: names it in the message."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise NoJson(what, str(error)) from error


class Refused(CommandError):
    """The front's answer was no."""

    def __init__(
        self, request: str, status: int, code: str | None, message: str, after: str
    ) -> None:
        super().__init__(request, status, code, message, after)
        self.request, self.status, self.code = request, status, code
        self.message, self.retry_after = message, after

    def __str__(self) -> str:
        kind = f"{self.status} {self.code}" if self.code else str(self.status)
        return clean(f"{self.request} was refused ({kind}): {self.message}{self._advice()}")

    def _advice(self) -> str:
        if self.status == 401:
            return ". Put a key that is good into ARBITER_KEY"
        if self.code == "scope_missing":
            return ". Make a key that has it (`arbiter key add NAME --scope SCOPE`)"
        return f". Try again in {self.retry_after} s" if self.retry_after else ""


class NotTheFront(CommandError):
    """An answer in another form than a front gives."""

    def __init__(self, request: str, status: int, body: str) -> None:
        super().__init__(request, status, body)
        self.request, self.status, self.body = request, status, body

    def __str__(self) -> str:
        shown = clean(self.body[:SHOWN_CHARS_MOST].strip()) or "an empty body"
        advice = (
            "The front failed: see `serve status` and its log"
            if self.status >= 500
            else "Is the address right, and the front of this version?"
        )
        was = f"{self.request} was answered ({self.status}) in no form of the front"
        return f"{was}: {shown}. {advice}"


class StreamEnded(CommandError):
    def __init__(self, url: str, last: int, cause: str) -> None:
        super().__init__(url, last, cause)
        self.url, self.last, self.cause = url, last, cause

    def __str__(self) -> str:
        return (
            f"the events of {self.url} ended behind {self.last} ({self.cause});"
            f" `arbiter events --follow --after {self.last}` goes on from there"
        )


class _Cut(Exception):
    """A stream that has ended, and why."""


class Absence:
    """How long a front has not answered a command that follows it, since its last answer."""

    def __init__(self) -> None:
        self.has_answered = False
        self._since_s: float | None = None

    def end(self) -> None:
        self.has_answered, self._since_s = True, None

    def waited(self, error: Exception) -> bool:
        """Waits a little, after which the front may be back. Returns False at once where waiting
        cannot help: it never answered, refuses, or is away for RETURNS_S."""
        is_refusal = isinstance(error, Refused | NotTheFront) and error.status < 500
        now_s = time.monotonic()
        self._since_s = now_s if self._since_s is None else self._since_s
        if is_refusal or not self.has_answered or now_s - self._since_s > RETURNS_S:
            return False
        time.sleep(AGAIN_S)
        return True


class Front:
    """The front at one address, asked with one key."""

    def __init__(self, url: str, client: "httpx.Client") -> None:
        self.url, self._client = url, client

    def get(self, path: str) -> Any:
        """Raises NoFront, Refused, NotTheFront."""
        return self.send("GET", path)

    def send(self, method: str, path: str, body: object = None) -> Any:
        """The JSON value that the front answers with. Raises NoJson, NoFront, Refused,
        NotTheFront."""
        import httpx

        request = f"{method} {self.url}{path}"
        check_json(f"the body of {request}", body)
        try:
            answer = self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise NoFront(self.url, _cause(error)) from error
        _check(answer, request)
        try:
            return answer.json()
        except ValueError:
            raise NotTheFront(request, answer.status_code, answer.text) from None

    def follow(self, after: int) -> Iterator[dict[str, Any]]:
        """Events behind sequence number `after`, as they happen, for ever, also where the front
        restarts meanwhile. Raises NoFront, Refused, NotTheFront, StreamEnded."""
        last, absence = after, Absence()
        while True:
            try:
                for event in self._stream(f"/arbiter/events?after={last}", absence):
                    last = event["seq"]
                    yield event
            except (_Cut, NoFront, NotTheFront, Refused) as error:
                if absence.waited(error):
                    continue
                if isinstance(error, _Cut) or (isinstance(error, NoFront) and absence.has_answered):
                    raise StreamEnded(self.url, last, str(error)) from error
                raise

    def view(self, after: int) -> Iterator[dict[str, Any]]:
        """Messages of the view's stream, with events behind `after`, until it ends: after some
        minutes, or with the front. Raises NoFront, Refused, NotTheFront."""
        with suppress(_Cut):
            yield from self._stream(f"/arbiter/view/stream?after={after}", Absence())

    def _stream(self, path: str, absence: Absence) -> Iterator[dict[str, Any]]:
        """The values of a stream, whose beginning ends the absence. Raises _Cut when it ends,
        NoFront, Refused, NotTheFront."""
        import httpx

        try:
            with self._client.stream("GET", path) as answer:
                if answer.is_error:
                    answer.read()
                _check(answer, f"GET {self.url}{path}")
                absence.end()
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        yield json.loads(line.removeprefix("data: "))
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise NoFront(self.url, _cause(error)) from error
        except httpx.HTTPError as error:
            raise _Cut(_cause(error)) from error
        raise _Cut("the front closed the connection")


@contextmanager
def front(url: str | None) -> Iterator[Front]:
    """The front at `url`, else on this machine. Raises BadUrl."""
    import httpx

    where = address(url)
    with httpx.Client(
        base_url=where,
        headers=_headers(api_key(where)),
        timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
        transport=transport(),
        **httpx_options(where),
    ) as client:
        yield Front(where, client)


def transport() -> "httpx.BaseTransport | None":
    """httpx's own; tests put theirs in its place."""
    return None


def address(url: str | None) -> str:
    """The front's, without a slash at its end. Raises BadUrl."""
    base_url = (url or os.environ.get("ARBITER_URL") or URL).rstrip("/")
    try:
        parts = urlsplit(base_url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good:
        raise BadUrl(base_url)
    return base_url


def api_key(url: str) -> str:
    """`ARBITER_KEY`; else, for a front on this machine only, the key that its first start left for
    the owner: a key with every scope is not sent to whatever address was typed."""
    from deployments.front.access import keys

    if key := os.environ.get("ARBITER_KEY"):
        return key
    file = keys.first_key_path(keys.keys_path())
    is_here = is_loopback(urlsplit(url).hostname or "")
    return file.read_text().strip() if is_here and os.access(file, os.R_OK) else ""


def _headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def _check(answer: "httpx.Response", request: str) -> None:
    """Raises Refused for a refusal in the front's own form, NotTheFront for any other."""
    if answer.is_success:
        return
    try:
        error = answer.json()["error"]
        code, message = error.get("code"), str(error["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise NotTheFront(request, answer.status_code, answer.text) from None
    raise Refused(request, answer.status_code, code, message, answer.headers.get("retry-after", ""))


def _cause(error: "httpx.HTTPError") -> str:
    """Returns the cause of a failed request as an operator can act on it."""
    import httpx

    if isinstance(error, httpx.ConnectTimeout):
        return f"no connection within {CONNECT_S:.0f} s"
    if isinstance(error, httpx.TimeoutException):
        return f"no answer within {ANSWER_S:.0f} s"
    return str(error) or type(error).__name__
