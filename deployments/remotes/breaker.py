"""A circuit breaker: after failures of a remote, no request asks it for a while.

How many in a row, and for how long, depends on what failed: a wrong key does not mend itself in a
second. After the cool-down one request tries; until it has ended, the others are still refused.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Failure(StrEnum):
    """Why a remote gave no answer; the outcomes that events and metrics name."""

    CONNECT = "connect"  # no address that may be asked, or no connection: nothing has left
    CERTIFICATE = "certificate"  # TLS does not prove that it is the remote: nothing has left
    TIMEOUT = "timeout"
    BROKEN = "broken"  # the connection ended before the answer did
    SERVER = "server"  # a status of 500 and above, or an error that comes with 200
    LIMITED = "limited"  # 429
    KEY = "key"  # 401
    FORBIDDEN = "forbidden"  # 403: of a wrong key too, or of one request that is not to be served
    PROTOCOL = "protocol"  # a redirect, another content type, no JSON
    # The remote works, and the request may be the reason: no RULES, so no other request is refused.
    SIZE = "size"  # more bytes than the row's bounds allow
    FORM = "form"  # JSON of another form than its path has


@dataclass(frozen=True, slots=True)
class Rule:
    """Opens after `in_a_row`, for `cool_s`, doubled each time it opens again, up to `most_s`."""

    in_a_row: int
    cool_s: float
    most_s: float


# After Envoy's outlier detection, whose defaults are five 5xx in a row, 30 s, and at most 300 s. A
# failure that is not by chance opens the breaker at once.
_TRANSIENT = Rule(3, 10.0, 300.0)
RULES = {
    Failure.CONNECT: _TRANSIENT,
    Failure.TIMEOUT: _TRANSIENT,
    Failure.BROKEN: _TRANSIENT,
    Failure.SERVER: _TRANSIENT,
    Failure.FORBIDDEN: _TRANSIENT,
    Failure.LIMITED: Rule(1, 5.0, 300.0),
    Failure.CERTIFICATE: Rule(1, 300.0, 300.0),
    Failure.KEY: Rule(1, 300.0, 300.0),
    Failure.PROTOCOL: Rule(1, 60.0, 300.0),
}
TRIAL_S = 1.0  # when to come back while another request is the trial


class Breaker:
    """The circuit breaker of one remote, in one front."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._in_a_row: Counter[Failure] = Counter()
        self._opened: Counter[Failure] = Counter()  # since the last answer
        self._until_s = float("-inf")
        self._is_open = self._is_tried = False
        self.cause: Failure | None = None  # of the last opening

    @property
    def left_s(self) -> float:
        """Seconds until a request may try; 0: now."""
        if not self._is_open:
            return 0.0
        left_s = self._until_s - self._now_s()
        return max(left_s, TRIAL_S) if self._is_tried else max(0.0, left_s)

    def begin(self) -> bool:
        """Called before a request is sent, which `left_s` must allow. Returns whether it is the
        trial."""
        self._is_tried = self._is_open
        return self._is_open

    def answered(self) -> None:
        """Called for an answer, which shows that the remote works. Closes the breaker."""
        self._in_a_row.clear()
        self._opened.clear()
        self._is_open = self._is_tried = False

    def abandoned(self) -> None:
        """Called when the trial has ended, also without a result: another request may try."""
        self._is_tried = False

    def failed(self, failure: Failure, retry_after_s: float | None = None) -> None:
        """Counts a failure, and opens the breaker where its rule says so. `retry_after_s`: as the
        remote asks for it; the rule bounds it."""
        rule = RULES.get(failure)
        if rule is None:
            return self.answered()
        self._in_a_row[failure] += 1
        was_tried, self._is_tried = self._is_tried, False
        if not was_tried and self._in_a_row[failure] < rule.in_a_row:
            return
        cool_s = rule.cool_s * 2 ** min(self._opened[failure], 16)
        self._opened[failure] += 1
        self._in_a_row[failure] = 0
        self._is_open, self.cause = True, failure
        self._until_s = self._now_s() + min(rule.most_s, max(cool_s, retry_after_s or 0.0))
