"""Batches of the official client on a running graph."""

import json
from typing import Any

from openai import OpenAI
from openai.types import Batch

from tests.graph.conftest import until

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "cancelled", "expired")


def lines(url: str, bodies: list[dict[str, Any]]) -> bytes:
    rows = [
        {"custom_id": f"r{n}", "method": "POST", "url": url, "body": body}
        for n, body in enumerate(bodies)
    ]
    return "\n".join(json.dumps(row) for row in rows).encode()


def begin(client: OpenAI, url: Any, bodies: list[dict[str, Any]], window: Any = "24h") -> Batch:
    file = client.files.create(file=("in.jsonl", lines(url, bodies)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=url, completion_window=window)


def ended(client: OpenAI, batch: Batch, within_s: float = 120) -> Batch:
    until(
        lambda: client.batches.retrieve(batch.id).status in ENDED, within_s, f"{batch.id} has ended"
    )
    return client.batches.retrieve(batch.id)


def results(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(row) for row in client.files.content(file_id).text.splitlines()]
