"""What is counted of a request that vLLM refused as too long, before its model grows for it."""

import json
from typing import Any

import pytest

from deployments.engines import asgi
from deployments.engines.protocol import COULD_GROW
from deployments.engines.vllm.routes.context_growth import ContextGrowth

pytestmark = pytest.mark.spec("A14")
MOST_TOKENS, TOKEN_CHARACTERS = 100, 2
MOST = MOST_TOKENS * TOKEN_CHARACTERS
LEAVES = {"type": "http.disconnect"}


class Refusing:
    """An application to which each prompt is too long, and has a token for each two characters."""

    def __init__(self) -> None:
        self.counted = 0
        self.heard: Any = None  # what the client sent while a prompt was counted

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await asgi.read_body(receive)
        if scope["path"] == "/tokenize":
            self.counted += 1
            self.heard = await receive()
            return await asgi.respond(send, 200, {"count": 50})
        await asgi.refuse(send, 400, "the maximum context length is 4")


async def asked(api: Refusing, path: str, body: dict[str, Any]) -> tuple[bool, str]:
    """Whether the model may grow for the request, and what its refusal says."""
    sent: list[Any] = []

    async def left() -> Any:
        return LEAVES

    async def send(message: Any) -> None:
        sent.append(message)

    growth = ContextGrowth(api, "m", MOST_TOKENS, TOKEN_CHARACTERS)
    raw = json.dumps(body).encode()
    await growth.serve(api, {"path": path}, asgi.replay(raw, left), send)
    [head, whole] = sent
    assert head["status"] == 400
    message = json.loads(whole["body"])["error"]["message"]
    return COULD_GROW.encode() in dict(head["headers"]), message


def chat(text: str) -> dict[str, Any]:
    url = "data:image/png;base64," + "A" * MOST  # no text
    parts = [{"type": "text", "text": text[1:]}, {"type": "image_url", "image_url": {"url": url}}]
    return {
        "messages": [{"role": "system", "content": text[:1]}, {"role": "user", "content": parts}]
    }


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat),
        ("/v1/completions", lambda text: {"prompt": text}),
        ("/v1/completions", lambda text: {"prompt": ["a", text]}),
        ("/v1/responses", lambda text: {"input": text}),
    ],
)
async def test_prompt_of_more_characters_than_the_grown_context_has_is_not_tokenized(
    path: str, body: Any
) -> None:
    api = Refusing()
    could_grow, message = await asked(api, path, body("x" * (MOST + 1)))
    assert (could_grow, api.counted) == (False, 0)
    assert "may grow to 100 tokens; the request needs more" in message
    could_grow, _ = await asked(api, path, body("x" * MOST))
    assert could_grow and api.counted > 0


async def test_application_that_counts_hears_that_the_client_has_left() -> None:
    api = Refusing()
    await asked(api, "/v1/completions", {"prompt": "x"})
    assert api.heard == LEAVES
