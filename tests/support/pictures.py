"""Pictures in tests: files of them, forms that carry them, and what an answer shows."""

import base64
import http.client
import io
import json
from typing import Any

import numpy as np
from PIL import Image

from models.shapes import Fact, draw, read
from tests.support.engine_host import Child, Connection

BOUNDARY = "a-boundary-of-forms"
FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
# One rounding of float32 to a grey level: a batch's size may change the order of sums in it.
ROUNDING = 1


def png(image: Image.Image, file_format: str = "PNG", **how: Any) -> bytes:
    target = io.BytesIO()
    image.save(target, format=file_format, **how)
    return target.getvalue()


def drawn(fact: Fact) -> bytes:
    return png(draw(fact))


def upper_half(size: tuple[int, int] = (64, 64)) -> bytes:
    """OpenAI's mask: what is transparent is painted anew."""
    mask = Image.new("RGBA", size, (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), (0, 0, size[0], size[1] // 2))
    return png(mask)


def form(fields: dict[str, Any], files: dict[str, bytes]) -> bytes:
    """multipart/form-data."""
    parts = [(f'name="{name}"', str(value).encode()) for name, value in fields.items()]
    parts += [(f'name="{name}"; filename="a file"', raw) for name, raw in files.items()]
    body = b""
    for head, raw in parts:
        body += f"--{BOUNDARY}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode()
        body += raw + b"\r\n"
    return body + f"--{BOUNDARY}--\r\n".encode()


def send(
    child: Child, path: str, body: bytes, headers: dict[str, str]
) -> tuple[int, http.client.HTTPResponse, Connection]:
    connection = Connection(child.path)
    connection.request("POST", path, body, headers)
    answer = connection.getresponse()
    return answer.status, answer, connection


def edit(
    child: Child, fields: dict[str, Any], files: dict[str, bytes], path: str = "/v1/images/edits"
) -> tuple[int, Any]:
    _, answer, connection = send(child, path, form(fields, files), FORM)
    raw = answer.read()
    connection.close()
    return answer.status, json.loads(raw)


def picture(row: dict[str, Any]) -> Image.Image:
    """Of one row of `data`, or of one event."""
    return Image.open(io.BytesIO(base64.b64decode(row["b64_json"])))


def pictures(body: dict[str, Any]) -> list[Image.Image]:
    return [picture(row) for row in body["data"]]


def shows(image: Image.Image) -> Fact | None:
    return read(image).fact


def difference(one: Image.Image, other: Image.Image) -> int:
    """The largest of any pixel, in grey levels."""
    return int(np.abs(np.asarray(one, int) - np.asarray(other, int)).max())


def events(raw: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Names and data of server-sent events, comments left out."""
    events = []
    for block in raw.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if line[:1] != ":")
        if lines:
            events.append((lines.get("event", ""), json.loads(lines["data"])))
    return events
