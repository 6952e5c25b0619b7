"""The front as a FastAPI application: routes, exception handlers, and the bound on bodies."""

from functools import cache
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from starlette.middleware import Middleware
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from deployments.front.dependencies import FrontState, check_site
from deployments.front.inference.schemas import SCHEMAS
from deployments.front.middleware.body_limit import BodyLimit
from deployments.front.middleware.error_forms import ErrorForms
from deployments.front.middleware.http_errors import HANDLERS
from deployments.front.middleware.other_sites import OtherSites
from deployments.front.routes import (
    arbiter,
    async_jobs,
    audio,
    batches,
    config,
    console,
    files,
    free,
    health,
    jobs,
    leases,
    metrics,
    ollama,
    openai,
    plan,
    prewarm,
    queue,
    remotes,
    residency,
    responses,
    settings,
    tenants,
    view,
)
from deployments.jobs import responses as stored
from deployments.requests import prefixes

OWN = (prefixes.PATH, stored.PATH)  # paths of SCHEMAS whose routes are in modules of ROUTED
CHECKED = (Depends(check_site),)  # dependencies of every route


class Application(FastAPI):
    """FastAPI, whose /openapi.json has no 422: HANDLERS turn every 422 into a 400."""

    def build_middleware_stack(self) -> ASGIApp:
        """Puts two middlewares around all of Starlette's, so that they also see the answers of its
        outermost one, which handles errors that nothing else has caught."""
        forms = ErrorForms(super().build_middleware_stack())
        return OtherSites(forms, auth=lambda: self.state.front.auth)

    def openapi(self) -> dict[str, Any]:
        described = super().openapi()
        for methods in described["paths"].values():
            for operation in methods.values():
                operation["responses"].pop("422", None)
        return described


ROUTED = (
    openai,
    responses,
    async_jobs,
    files,
    batches,
    jobs,
    prewarm,
    audio,
    ollama,
    health,
    console,
    tenants,
    # Routes that show and steer the arbiter.
    arbiter,
    view,
    metrics,
    plan,
    free,
    leases,
    queue,
    remotes,
    residency,
    settings,
    config,
)


def build(front: FrontState) -> FastAPI:
    """Serves the paths of SCHEMAS and of the front's table."""
    app = Application(
        title="serve-arbiter",
        docs_url=None,  # FastAPI's page loads scripts of another site into the console's origin
        redoc_url=None,
        dependencies=CHECKED,
        exception_handlers=HANDLERS,
        middleware=[Middleware(BodyLimit)],
    )
    app.state.front = front
    app.state.offered = []
    app.router.routes.extend(_fixed_routes())
    offer(app)
    return app


@cache
def _fixed_routes() -> tuple[BaseRoute, ...]:
    """The routes that every front has. They refer to no front, so a process makes them once: to
    read the signatures and schemas of a hundred handlers takes a tenth of a second. The generating
    routes come first, because a request is compared with one route after the other, 1 us for
    each."""
    router = APIRouter(dependencies=CHECKED)
    for path, arguments in openai.post_routes(tuple(p for p in SCHEMAS if p not in OWN)):
        router.add_api_route(path, openai.infer, methods=["POST"], **arguments)
    for module in ROUTED:
        router.include_router(module.router)
    return tuple(router.routes)


def offer(app: FastAPI) -> None:
    """Adds a route for each path that the table lists and SCHEMAS does not, in place of such routes
    of the table before."""
    app.router.routes[:] = [one for one in app.router.routes if one not in app.state.offered]
    front: FrontState = app.state.front
    listed = {path for c in front.table.capabilities.values() for path in c.paths}
    before = len(app.router.routes)
    for path, arguments in openai.post_routes(tuple(sorted(listed - SCHEMAS.keys()))):
        app.add_api_route(path, openai.infer, methods=["POST"], **arguments)
    app.state.offered = app.router.routes[before:]
    app.openapi_schema = None  # FastAPI describes the routes anew
