"""Requests to Ray's dashboard, which has Serve's REST API too, with this user's token."""

import functools
import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

APPLICATIONS = "/api/serve/applications/"


def answer(address: str, path: str) -> Any:
    with urllib.request.urlopen(_request(address, path), timeout=60) as response:
        return json.load(response)


def deploy(address: str, config: dict[str, Any]) -> None:
    """As `serve deploy` does it: a process that takes a second of a core."""
    request = _request(address, APPLICATIONS, json.dumps(config).encode(), "PUT")
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=60):
        pass


def _request(
    address: str, path: str, data: bytes | None = None, method: str = "GET"
) -> urllib.request.Request:
    head = {"Authorization": f"Bearer {_token()}"}
    return urllib.request.Request(f"{address}{path}", data, head, method=method)


@functools.cache
def _token() -> str:
    """Of this user's clusters; a second of a core each time that Ray is asked."""
    command = [str(Path(sys.executable).with_name("ray")), "get-auth-token"]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    return said.stdout.strip()
