"""What this package refuses, as RequestErrors: each has a status and a code."""

from dataclasses import field

from arbiter.errors import RequestError, error_fields


@error_fields
class StorageFull(RequestError):
    """The disk has no room for what was to be kept; nothing of it is kept."""

    path: str
    why: str
    status_code, code = 507, "storage_full"

    def __str__(self) -> str:
        return f"nothing was kept, {self.path} cannot grow: {self.why}; free space there"


@error_fields
class StorageFailed(RequestError):
    """The state file or the folder of bodies cannot be used just now."""

    path: str
    why: str
    status_code, code, retry_after_s = 503, "storage_failed", 5.0

    def __str__(self) -> str:
        return (
            f"{self.path} cannot be read or written just now: {self.why}; send the request again in"
            f" {self.retry_after_s:.0f} s, or check its disk and permissions"
        )


class BodyLost(StorageFailed):
    """A body that a row names is gone from the folder, or is no longer as it was written."""


@error_fields
class NewerStateFile(RequestError):
    """Newer code has written the tables of jobs; this code would read them wrongly."""

    path: str
    version: int
    known_version: int
    status_code, code = 503, "newer_state_file"

    def __str__(self) -> str:
        has = f"{self.path} has tables of jobs of version {self.version}"
        do = "start the newer code again, or name another file as arbiter.state_file"
        return f"{has}, and this code knows {self.known_version}; {do}"


@error_fields
class Superseded(RequestError):
    """A later process has taken the jobs over; this one must not write."""

    epoch: int
    status_code, code, retry_after_s = 503, "jobs_restarting", 1.0

    def __str__(self) -> str:
        return f"another process runs the jobs now (this one was number {self.epoch}); send again"


@error_fields
class NotFound(RequestError):
    """The tenant has no such object."""

    kind: str
    id: str
    status_code, code = 404, "not_found"

    def __str__(self) -> str:
        return f"no {self.kind} {self.id!r}"


@error_fields
class Refused(RequestError):
    """A request that its field makes wrong."""

    message: str
    param: str | None = None
    status_code, code = 400, "invalid_request"

    def __str__(self) -> str:
        return self.message


@error_fields
class Conflict(RequestError):
    """The object's state does not allow it."""

    kind: str
    id: str
    state: str
    wanted: str
    status_code, code = 409, "conflict"

    def __str__(self) -> str:
        return f"{self.kind} {self.id} is {self.state} and cannot be {self.wanted}"


@error_fields
class TenantLimitReached(RequestError):
    """More than one tenant may keep or have waiting."""

    what: str
    most: int
    retry_after_s: float = field(default=60.0)
    status_code, code = 429, "quota_exceeded"

    def __str__(self) -> str:
        return f"this key's tenant has {self.what}, and {self.most} at most; delete or wait for one"


@error_fields
class EventsRestarted(RequestError):
    """The attempt whose events a reader has is over, and another has events of its own."""

    job: str
    last: int
    attempt: int
    status_code, code = 409, "events_restarted"

    def __str__(self) -> str:
        return (
            f"the events of {self.job} up to number {self.last} are of an attempt that was lost,"
            f" and it is at attempt {self.attempt}; drop them, and read its events from the first"
            " (`after=0`)"
        )
