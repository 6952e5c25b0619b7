"""Errors of the arbiter itself: it is closing, away or in another epoch, or it is broken."""

from arbiter.errors.base import ArbiterError, RequestError, error_fields
from arbiter.units import Epoch, Generation


@error_fields
class SettingsConflict(RequestError):
    status_code, code = 409, "settings_conflict"

    expected: Generation
    current: Generation

    def __str__(self) -> str:
        return (
            f"the settings are of generation {self.current} by now, not {self.expected};"
            " read them again and repeat the change"
        )


class ArbiterClosing(RequestError):
    code = "arbiter_closing"
    retry_after_s = 30.0  # the longest shutdown; then another may be started

    def __str__(self) -> str:
        return "the arbiter is shutting down and grants nothing; start it again to load models"


@error_fields
class ArbiterUnavailable(RequestError):
    code = "arbiter_unavailable"

    waited_s: float
    retry_after_s: float = 2.0

    def __str__(self) -> str:
        return (
            f"the arbiter was not reachable for {self.waited_s:.1f} s, so nothing may be loaded;"
            " Ray restarts it within seconds if it died; if this lasts, look at `serve status` and"
            " at Ray's logs of the session, /tmp/ray/session_latest/logs"
        )


@error_fields
class StateFileInUse(ArbiterError):
    """Another system has the state file, beside which keys, jobs and results lie."""

    state_file: str
    session: str
    pid: int

    def __str__(self) -> str:
        return (
            f"{self.state_file} is the state file of another running system (Ray's session"
            f" {self.session}, process {self.pid}); stop that one, or give this one a file of its"
            " own: `arbiter.state_file` in its configuration, or the variable XDG_STATE_HOME"
        )


NEVER_JOINED = Epoch(0)  # believed in by a holder that the arbiter does not know


@error_fields
class StaleEpoch(RequestError):
    status_code, code = 409, "stale_epoch"

    sent: Epoch
    current: Epoch

    def __str__(self) -> str:
        return f"message of epoch {self.sent}, but the arbiter is in epoch {self.current}; rejoin"


@error_fields
class ActorAbsent(ArbiterError):
    """No actor of this name runs in the cluster: the arbiter or a node's agent has yet to start, or
    was stopped."""

    name: str

    def __str__(self) -> str:
        return f"no actor named {self.name} runs in this cluster; `arbiter serve` starts it"


class AgentAway(ArbiterError):
    """A node's agent did not answer just now. What was asked of it is asked again."""


class LedgerBroken(ArbiterError):
    """An accounting identity does not hold."""
