"""What routes ask FastAPI for: the front's state, and a caller whose key has a scope."""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Header, Request
from fastapi.openapi.models import HTTPBearer
from fastapi.security.base import SecurityBase

from deployments.config.schema import Table
from deployments.front.access.auth import Authenticator
from deployments.front.access.keys import Caller, Keyring, Scope, keys_path
from deployments.front.access.per_tenant import PerTenant
from deployments.front.capability_apps import CapabilityApps
from deployments.front.inference.service import RETRY_AFTER_S, InferenceService
from deployments.front.inference.tasks import Tasks
from deployments.front.middleware.body_limit import HeldBodies
from deployments.front.status.forecasts import Forecasts
from deployments.front.status.metrics_page import MetricsPage
from deployments.front.status.serve_status import Applications
from deployments.front.status.viewing import Viewing
from deployments.jobs.client import JobsClient

# Requests that read files, results or events of jobs and background responses at the same time: of
# one tenant, and in one front. Each may take as long as it likes, with some MiB here, and the front
# takes them beside the calls in flight (ingress.Front).
READERS_MOST, READERS_IN_ALL = 64, 400
# Models that one tenant keeps in use by /v1/acquire, where there are others: above any number of
# models that a person works with, each for up to ten minutes.
ACQUIRES_MOST = 64
# Streams of the arbiter's events and of the view at the same time in one front. They have no end.
VIEWERS_MOST = 150


@dataclass(slots=True)
class FrontState:
    """The `app.state.front` of one front; `Front.reconfigure` changes it in place."""

    started_unix_s: int
    auth: Authenticator = field(default_factory=lambda: Authenticator(Keyring(keys_path())))
    service: InferenceService = field(default_factory=InferenceService)
    applications: Applications = field(default_factory=Applications)
    apps: CapabilityApps = field(default_factory=CapabilityApps)
    metrics: MetricsPage = field(default_factory=MetricsPage)
    viewing: Viewing = field(default_factory=Viewing)
    forecasts: Forecasts = field(default_factory=Forecasts)
    jobs: JobsClient = field(default_factory=JobsClient)
    uploads: PerTenant = field(default_factory=lambda: PerTenant("uploads"))
    readers: PerTenant = field(default_factory=lambda: PerTenant("readers", READERS_IN_ALL))
    viewers: PerTenant = field(default_factory=lambda: PerTenant("viewers", VIEWERS_MOST))
    calls: PerTenant = field(
        default_factory=lambda: PerTenant("requests in flight", retry_after_s=RETRY_AFTER_S)
    )
    acquires: PerTenant = field(default_factory=lambda: PerTenant("models acquired"))
    bodies: HeldBodies = field(default_factory=HeldBodies)
    tasks: Tasks = field(init=False)

    def __post_init__(self) -> None:
        self.tasks = Tasks(self.service, self.forecasts)

    @property
    def table(self) -> Table:
        return self.service.table

    def key_check(self, request: Request, scope: Scope) -> Callable[[], Caller]:
        """Returns a function for streams to call now and then: it raises Denied once the key of the
        request was removed or has lost the scope."""
        return lambda: self.auth.require(request, scope)

    @contextmanager
    def admitted(self, tenant: str) -> Iterator[None]:
        """A request in flight, within the bounds of all and of its tenant; entered before its body
        is awaited. Raises QueueFull, TenantLimitReached."""
        most = self.table.front.most_of_tenant if self.auth.has_tenants else math.inf
        with self.service.admitted(), self.calls.one(tenant, most):
            yield

    @contextmanager
    def counted(self, tenant: str) -> Iterator[None]:
        """The rest of a request that was admitted, whatever the bounds."""
        with self.service.counted(), self.calls.one(tenant, math.inf):
            yield

    def acquirer(self, tenant: str) -> AbstractContextManager[None]:
        """A model that a tenant keeps in use. Entering it raises TenantLimitReached."""
        return self.acquires.one(tenant, ACQUIRES_MOST if self.auth.has_tenants else math.inf)

    def reader(self, tenant: str) -> AbstractContextManager[None]:
        """A reader of what was kept. Entering it raises TenantLimitReached, QueueFull."""
        return self.readers.one(tenant, READERS_MOST)


# `async` without need, because FastAPI calls plain functions in a thread.
async def front_state(request: Request) -> FrontState:
    state: FrontState = request.app.state.front
    return state


State = Annotated[FrontState, Depends(front_state)]


# These two take the request alone: each dependency of a dependency costs every request 15 us.


async def check_site(request: Request) -> None:
    """A dependency of every route. Raises Denied: see Authenticator.check_site."""
    request.app.state.front.auth.check_site(request)


class Require(SecurityBase):
    """A dependency that gives the Caller. It raises Denied without a key of that scope. Model and
    name of the scheme are FastAPI's, so that /openapi.json says which routes take a key."""

    model = HTTPBearer(description="`arbiter key add` makes an API key")
    scheme_name = "HTTPBearer"

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    async def __call__(self, request: Request) -> Caller:
        caller: Caller = request.app.state.front.auth.require(request, self.scope)
        return caller


Viewer = Annotated[Caller, Depends(Require(Scope.VIEW))]
Lessee = Annotated[Caller, Depends(Require(Scope.LEASE))]
Admin = Annotated[Caller, Depends(Require(Scope.ADMIN))]
Inferrer = Annotated[Caller, Depends(Require(Scope.INFER))]

_EVENT_NUMBER = re.compile(r"[0-9]{1,18}")  # a million events a second for 30,000 years


def seen_event(after: int = 0, last_event_id: Annotated[str, Header()] = "") -> int:
    """The number of the last event that a reader has: of its `Last-Event-ID`, which a client may
    fill with anything, else `after`."""
    return int(last_event_id) if _EVENT_NUMBER.fullmatch(last_event_id) else after


SeenEvent = Annotated[int, Depends(seen_event)]
