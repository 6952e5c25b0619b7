"""Refusals of what a tenant may have: leases, quotas, and a day at a remote."""

from dataclasses import field

from arbiter.errors.base import RequestError, error_fields
from arbiter.units import Bytes, HolderId, human


@error_fields
class LeaseRefused(RequestError):
    status_code, code = 400, "lease_refused"

    field: str
    cause: str

    def __str__(self) -> str:
        return f"no lease: `{self.field}` {self.cause}"


@error_fields
class UnknownLease(RequestError):
    """This tenant never had a lease of that name, whether or not another tenant has."""

    status_code, code = 404, "lease_not_found"

    lease: str

    def __str__(self) -> str:
        return f"no lease {self.lease!r}; `arbiter leases` shows those there are"


@error_fields
class HolderQuarantined(RequestError):
    status_code, code = 503, "holder_quarantined"
    retry_after_s = 5.0  # what it keeps is asked for again this often

    holder: HolderId
    kept_bytes: Bytes

    def __str__(self) -> str:
        size = human(self.kept_bytes)
        return f"{self.holder} did not give {size} back; restart it, or free its memory by hand"


@error_fields
class QuotaExceeded(RequestError):
    status_code, code = 429, "quota_exceeded"
    retry_after_s = 10.0  # we cannot know when the tenant's leases end; a lapse takes 10 s

    tenant: str
    has: int
    wants: int
    bound: int
    unit: str

    def __str__(self) -> str:
        def amount(count: int) -> str:
            return human(Bytes(count)) if self.unit == "bytes" else f"{count} {self.unit}"

        return (
            f"{self.tenant} has {amount(self.has)} and asks for {amount(self.wants)} more;"
            f" it may have {amount(self.bound)}; end some of its work, or change the limits of"
            " tenants or leases in the configuration"
        )


@error_fields
class TenantCoolingDown(RequestError):
    status_code, code = 429, "tenant_cooling_down"

    tenant: str
    average_bytes: Bytes
    bound_bytes: Bytes
    retry_after_s: float = field()

    def __str__(self) -> str:
        has, may, for_s = human(self.average_bytes), human(self.bound_bytes), self.retry_after_s
        return f"{self.tenant} held {has} on average, of {may}; it loads no more for {for_s:.0f} s"


@error_fields
class RemoteBudgetSpent(RequestError):
    status_code, code = 429, "remote_budget_spent"

    remote: str
    tenant: str
    has: float
    wants: float
    bound: float
    unit: str  # tokens, money
    retry_after_s: float = field()

    def __str__(self) -> str:
        return (
            f"{self.tenant} has spent or reserved {self.has:g} {self.unit} at {self.remote} today"
            f" and asks for up to {self.wants:g} more; it may have {self.bound:g} a day (UTC)"
        )


@error_fields
class EgressRefused(RequestError):
    code, retry_after_s = "egress_not_recorded", 30.0  # a person has to mend the state file

    remote: str
    cause: str

    def __str__(self) -> str:
        return (
            f"nothing was sent to {self.remote}, because its budget cannot be kept: {self.cause};"
            " make the arbiter's state file writable"
        )


@error_fields
class EgressUnsettled(RequestError):
    code, retry_after_s = "egress_not_settled", 30.0  # a person has to mend the state file

    remote: str
    cause: str

    def __str__(self) -> str:
        return (
            f"what a request to {self.remote} cost is not written down, so its highest price stays"
            f" reserved: {self.cause}; make the arbiter's state file writable"
        )
