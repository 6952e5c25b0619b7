"""`GET /metrics`, read with the scope `view` (K2)."""

from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from deployments.front.dependencies import State, Viewer
from deployments.front.openapi import refusals

router = APIRouter()
PAGE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}}
}


@router.get("/metrics", response_class=Response, responses=PAGE | refusals(401, 403))
async def metrics(front: State, _: Viewer) -> Response:
    """Every metric in the text form of Prometheus. While no arbiter answers, `arbiter_up` is 0 and
    the rest is as it was."""
    return Response(await front.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)
