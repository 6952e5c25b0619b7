"""Which stable prefixes of one model are known, and which of them are to be warmed next (G1, G5).

Decides only; the times come in. A prefix comes from the configuration and stays, or from a request
and stays while conversations use it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from arbiter.units import Span, seconds
from deployments.requests.prefixes import Prefix

SHORT_TERM = seconds(300)  # G4: of KV that no conversation has claimed for longer
UNTOUCHED = Span(SHORT_TERM * 4 // 5)  # G5
FRESH = seconds(30)  # a session that opens repeats nothing younger of what others share
CONVERSATION_MOST_IDLE = seconds(
    3_600
)  # G4: a conversation idle for longer has ended, and its prefix with it
MOST_COUNT = 64  # of requests, per model: each is one token for an idle engine in each sweep
TRIES = 3  # of one pre-warm that real requests interrupt


class WarmCause(Enum):
    """Why a prefix is warmed."""

    LOAD = "load"
    SESSION = "session"
    SPEECH = "speech"
    SWEEP = "sweep"


@dataclass(slots=True)
class KnownPrefix:
    """One prefix. Times are in ns on the monotonic clock."""

    prefix: Prefix
    touched_ns: int  # by a request or a pre-warm
    used_ns: int  # by a request
    is_declared: bool = False
    cause: WarmCause | None = None  # it is to be warmed; None: it is not
    asked_ns: int = 0  # since then
    tries: int = 0
    has_failed: bool = False  # not tried again until it is used, or the next load


class PrefixBook:
    """The prefixes of one held model, by key; the least recently used first."""

    def __init__(self, declared: Iterable[Prefix]) -> None:
        self._known = {p.key: KnownPrefix(p, 0, 0, is_declared=True) for p in declared}
        self._too_large: dict[str, str] = {}  # keys, each with its tenant; the last used last

    def on_load(self, now_ns: int) -> None:
        """Begins anew with a new engine: what requests brought is forgotten, what is declared is
        warmed."""
        self._known = {key: entry for key, entry in self._known.items() if entry.is_declared}
        for entry in self._known.values():
            _ask(entry, WarmCause.LOAD, now_ns)

    def knows(self, key: str) -> bool:
        return key in self._known

    def add(self, prefix: Prefix, now_ns: int) -> None:
        """Takes the prefix of a request. The least recently used one of another request goes."""
        self._known[prefix.key] = KnownPrefix(prefix, now_ns, now_ns)
        of_requests = [key for key, entry in self._known.items() if not entry.is_declared]
        for key in of_requests[: max(0, len(of_requests) - MOST_COUNT)]:
            del self._known[key]

    def add_too_large(self, key: str, tenant: str) -> None:
        """Notes a prefix that is not kept, so that no further request is read for it."""
        self._too_large[key] = tenant
        for oldest in list(self._too_large)[:-MOST_COUNT]:
            del self._too_large[oldest]

    def is_too_large(self, key: str) -> bool:
        """Whether a prefix is noted as too large. To ask counts as a use."""
        if key not in self._too_large:
            return False
        self._too_large[key] = self._too_large.pop(key)
        return True

    def forget_tenant(self, tenant: str) -> None:
        """Forgets what requests of a tenant brought."""
        self._too_large = {k: whose for k, whose in self._too_large.items() if whose != tenant}
        self._known = {
            key: entry
            for key, entry in self._known.items()
            if entry.is_declared or entry.prefix.tenant != tenant
        }

    def on_use(self, key: str, now_ns: int) -> None:
        """Notes that a request which begins with the prefix runs, and warms it in passing."""
        entry = self._known[key] = self._known.pop(key)  # the last of the dictionary
        entry.touched_ns = entry.used_ns = now_ns
        entry.cause, entry.has_failed = None, False

    def ask(self, key: str, cause: WarmCause, now_ns: int) -> None:
        """Has a prefix warmed that a client asks for, whatever came of it before."""
        entry = self._known[key]
        entry.used_ns = now_ns
        _ask(entry, cause, now_ns)

    def ask_untouched(
        self, cause: WarmCause, for_span: Span, now_ns: int, tenant: str = ""
    ) -> None:
        """Has those warmed that nothing has touched for so long. `tenant`: only its own."""
        for entry in self._known.values():
            is_due = now_ns - entry.touched_ns >= for_span and not entry.has_failed
            if is_due and entry.cause is None and tenant in ("", entry.prefix.tenant):
                _ask(entry, cause, now_ns)

    def sweep(self, now_ns: int) -> None:
        """Has those warmed that G5 names, and forgets those of conversations that have ended."""
        self._known = {
            key: entry
            for key, entry in self._known.items()
            if entry.is_declared or now_ns - entry.used_ns < CONVERSATION_MOST_IDLE
        }
        self.ask_untouched(WarmCause.SWEEP, UNTOUCHED, now_ns)

    def next(self) -> KnownPrefix | None:
        """Returns the most recently used of those that are to be warmed."""
        waiting = [entry for entry in self._known.values() if entry.cause is not None]
        return max(waiting, key=lambda entry: entry.used_ns, default=None)

    @staticmethod
    def on_warmed(entry: KnownPrefix) -> None:
        """Notes a pre-warm that succeeded. It counts as of when it was asked for: so the next sweep
        finds the prefix due, however long its engine took."""
        entry.touched_ns, entry.cause = entry.asked_ns, None

    @staticmethod
    def on_failure(entry: KnownPrefix) -> None:
        entry.cause, entry.has_failed = None, True

    @staticmethod
    def on_interrupt(entry: KnownPrefix) -> None:
        """Notes that a real request interrupted the pre-warm, which is tried again once the engine
        is idle, TRIES times at most."""
        entry.tries += 1
        if entry.tries >= TRIES:
            entry.cause = None


def _ask(entry: KnownPrefix, cause: WarmCause, now_ns: int) -> None:
    entry.cause, entry.asked_ns, entry.tries, entry.has_failed = cause, now_ns, 0, False
