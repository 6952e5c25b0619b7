"""The table of routes in docs/http.md names exactly the routes that the front has."""

import re
from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.routing import Route

from deployments.front import application
from deployments.front.dependencies import FrontState, Require
from tests.support.pages import ROOT

PAGE = ROOT / "docs" / "http.md"
ROW = re.compile(r"^\| (GET|HEAD|POST|PUT|DELETE) \| (.+?) \| .+ \| (-|`\w+`) \| \[.+\]\(.+\) \|$")
OPEN = "-"  # of a route that never needs a key


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return application.build(FrontState(7))


def listed() -> list[tuple[str, str, str]]:
    """Method, path and scope of each route in the table."""
    rows = [row for line in PAGE.read_text().splitlines() if (row := ROW.match(line))]
    return [
        (row[1], path, row[3].strip("`")) for row in rows for path in re.findall(r"`(.+?)`", row[2])
    ]


def scopes_of(dependant: Dependant) -> Iterator[str]:
    """Scopes that the dependencies of a route require."""
    if isinstance(dependant.call, Require):
        yield str(dependant.call.scope)
    for one in dependant.dependencies:
        yield from scopes_of(one)


def served(app: FastAPI) -> Iterator[tuple[str, str, str]]:
    for route in app.routes:
        assert isinstance(route, Route | APIRoute), route
        own = set(scopes_of(route.dependant)) if isinstance(route, APIRoute) else set()
        assert len(own) <= 1, f"{route.path} needs {own}: the table has room for one scope"
        # Starlette has HEAD follow from GET where a route is none of FastAPI's.
        methods = route.methods if isinstance(route, APIRoute) else {"GET"}
        for method in methods or ():
            yield method, getattr(route, "path_format", route.path), (own or {OPEN}).pop()


@pytest.mark.spec("J1")
def test_page_lists_each_route_of_the_application_with_its_scope_and_no_other(app: FastAPI) -> None:
    rows = listed()
    assert len(rows) == len(set(rows)) > 90
    assert set(rows) == set(served(app))


@pytest.mark.spec("J1")
def test_page_lists_each_operation_of_the_description_and_says_which_need_a_key(
    app: FastAPI,
) -> None:
    described = {
        (method.upper(), path, "security" in operation)
        for path, methods in app.openapi()["paths"].items()
        for method, operation in methods.items()
    }
    rows = {(method, path, scope != OPEN) for method, path, scope in listed()}
    undescribed = {path for _, path, _ in rows - described}
    assert undescribed == {"/openapi.json"}
    assert not described - rows
