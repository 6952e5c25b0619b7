"""The console's files (K4). They are public; what they show needs the scope `view`.

The files are read once: a hundred kilobytes. Browsers ask again with the ETag, so that an upgrade
shows at once.
"""

import hashlib
import mimetypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Header
from fastapi.responses import PlainTextResponse, Response

from deployments.front.inference.request import BadRequest
from deployments.front.openapi import refusals

router = APIRouter()
FOLDER = Path(__file__).parents[1] / "console"
SUFFIXES = {".html", ".js", ".mjs", ".css"}
# No inline script or style, no other site, no frame around it.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # asks again, and is told that nothing has changed
}
PAGE: dict[int | str, dict[str, Any]] = {200: {"content": {"text/html": {}, "text/plain": {}}}}
FILE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/javascript": {}, "text/css": {}}},
    304: {"description": "It is as the browser has it"},
}
IfNoneMatch = Annotated[str, Header()]


@dataclass(frozen=True, slots=True)
class File:
    """One file of the console."""

    content: bytes
    media_type: str
    etag: str


@cache
def files() -> dict[str, File]:
    """The console's files by their path under `/console/`; the page itself is `index.html`."""
    paths = (path for path in FOLDER.rglob("*") if path.suffix in SUFFIXES)
    return {str(path.relative_to(FOLDER)): _file(path) for path in sorted(paths)}


def _file(path: Path) -> File:
    content = path.read_bytes()
    script = path.suffix in (".js", ".mjs")
    kind = "text/javascript" if script else mimetypes.types_map[path.suffix]
    return File(content, kind, f'"{hashlib.sha256(content).hexdigest()[:20]}"')


@router.get("/", response_class=Response, responses=PAGE)
async def page(accept: Annotated[str, Header()] = "", if_none_match: IfNoneMatch = "") -> Response:
    """The console, for a browser; else what Ollama's clients look for."""
    if "text/html" not in accept:
        return PlainTextResponse("Ollama is running", headers={"vary": "accept"})
    return _answer(files()["index.html"], if_none_match)


@router.get("/console/{name:path}", response_class=Response, responses=FILE | refusals(404))
async def file(name: str, if_none_match: IfNoneMatch = "") -> Response:
    """One of the console's scripts and styles."""
    asset = files().get(name)
    if asset is None:
        raise BadRequest(f"/console/{name} is no file of the console", None, 404)
    return _answer(asset, if_none_match)


def _answer(asset: File, if_none_match: str) -> Response:
    headers = HEADERS | {"etag": asset.etag, "vary": "accept"}
    if asset.etag in if_none_match:
        return Response(status_code=304, headers=headers)
    return Response(asset.content, media_type=asset.media_type, headers=headers)
