"""PerTenant: how many requests of one kind each tenant has at once."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from arbiter.errors import QueueFull
from deployments.jobs.errors import TenantLimitReached

RETRY_AFTER_S = 5.0  # when one of so many may have ended


class PerTenant:
    """The requests of one kind that are there now, by tenant."""

    def __init__(
        self, what: str, most_in_all: int | None = None, *, retry_after_s: float = 60.0
    ) -> None:
        """`what` they are, as in "4 uploads at once"; `most_in_all`: of all tenants;
        `retry_after_s`: when one of a tenant's may have ended."""
        self._what, self._most_in_all, self._retry_after_s = what, most_in_all, retry_after_s
        self._counts = Counter[str]()

    @contextmanager
    def one(self, tenant: str, most: float) -> Iterator[None]:
        """Counts one more of a tenant until it is left; entered before the request takes anything.
        `most`: of this tenant, math.inf for no bound. Raises TenantLimitReached, QueueFull."""
        if (count := self._counts[tenant]) >= most:
            what = f"{count} {self._what} at once"
            raise TenantLimitReached(what, int(most), self._retry_after_s)
        total = self._counts.total()
        if self._most_in_all is not None and total >= self._most_in_all:
            raise QueueFull(self._what, total, self._most_in_all, RETRY_AFTER_S)
        self._counts[tenant] += 1
        try:
            yield
        finally:
            self._counts[tenant] -= 1
            self._counts = +self._counts  # those above 0
