"""What crosses the border of this package: an offer, a call that may leave, and why one may not."""

from dataclasses import dataclass

from arbiter.errors import RequestError
from deployments.messages import InferenceCall

# Of every answer that a remote made: `REMOTE/MODEL`, the model by its name there.
SERVED_BY = "x-arbiter-served-by"


class RemoteRefused(RequestError):
    """This request does not leave. The text has no part of it."""

    def __init__(self, status: int, code: str, message: str, retry_after_s: float | None = None):
        super().__init__(status, code, message, retry_after_s)
        self.status_code, self.code, self.message = status, code, message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message


class RemoteFailed(RequestError):
    """A remote did not answer, or broke off. What it said itself is not passed on: it may repeat
    the key it was sent."""

    status_code, code = 502, "remote_failed"

    def __init__(self, remote: str, failure: str, why: str, retry_after_s: float | None = None):
        super().__init__(remote, failure, why, retry_after_s)
        self.remote, self.failure, self.why = remote, failure, why
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"the remote {self.remote} did not answer: {self.why}"


@dataclass(frozen=True, slots=True)
class Offer:
    """What a remote model would do for one request, and whether it may. Has no part of it."""

    model: str
    remote: str
    refusal: RequestError | None  # None: the request may leave
    tokens: int = 0  # at most, prompt and answer
    money: float = 0.0  # at most, in the currency of the operator's prices
    seconds: float = 0.0  # to the end of the answer, as its last ones took

    @property
    def is_allowed(self) -> bool:
        return self.refusal is None

    @property
    def reason(self) -> str:
        """Why not, in words without a prompt; empty where it may leave."""
        return "" if self.refusal is None else str(self.refusal)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCall(InferenceCall):
    """A call that may leave, with the body that does. Only `Remotes.call` makes one."""

    remote: str
    prompt_tokens: int  # about
    answer_tokens: int  # at most
    is_stream: bool
    tells_usage: bool
