"""Whether a request that vLLM refused would fit the longer context that its model may grow to
(SPEC A14). Only requests whose length is known to fit are marked, so that nobody makes an engine
start anew with a request that would be refused again.
"""

import asyncio
import json
from typing import Any

from deployments.engines.protocol import COULD_GROW, Asgi, Receive, Scope, Send

# What decides how many tokens a prompt has, of the routes whose prompts vLLM's `/tokenize` counts.
_COUNTED = {
    "/v1/chat/completions": ("messages", "tools", "chat_template_kwargs", "add_generation_prompt",
                             "continue_final_message", "add_special_tokens"),
    "/v1/completions": ("prompt", "add_special_tokens"),
}  # fmt: skip
_OUTPUT = ("max_completion_tokens", "max_tokens")


class Room:
    """Stands between the host and vLLM's own app. `most_tokens`: context once grown."""

    def __init__(self, api: Asgi, model: str, most_tokens: int) -> None:
        self.api, self.model, self.most_tokens = api, model, most_tokens

    async def serve(self, app: Asgi, scope: Scope, receive: Receive, send: Send) -> None:
        """As `app` would, with a refusal marked that would be none if the model had grown."""
        if scope["path"] not in _COUNTED:
            return await app(scope, receive, send)
        said = await _whole(receive)
        held: list[Any] = []

        async def marking(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] == 400:
                held.append(message)
                return
            if held:
                start = held.pop()
                if await self._would_fit(scope["path"], said):
                    mark = (COULD_GROW.encode(), b"context")
                    start = {**start, "headers": [*start["headers"], mark]}
                await send(start)
            await send(message)

        await app(scope, _again(said, receive), marking)

    async def _would_fit(self, path: str, said: bytes) -> bool:
        """It needs more than the context now, and no more than the one it may grow to."""
        try:
            body = json.loads(said)
            wanted = max(int(body.get(name) or 1) for name in _OUTPUT)
        except (ValueError, TypeError, AttributeError):
            return False  # the refusal says what is wrong with it
        asked = {name: body[name] for name in _COUNTED[path] if name in body}
        counted = await self._tokenized({"model": self.model, **asked})
        return counted["max_model_len"] < counted["count"] + wanted <= self.most_tokens

    async def _tokenized(self, asked: dict[str, Any]) -> dict[str, int]:
        """Tokens of a prompt, and the context now; more than any context when it is not counted."""
        scope = {
            "type": "http", "method": "POST", "path": "/tokenize", "raw_path": b"/tokenize",
            "query_string": b"", "headers": [(b"content-type", b"application/json")],
            "http_version": "1.1", "scheme": "http", "root_path": "", "client": None,
            "server": None,
        }  # fmt: skip
        answer: list[bytes] = []
        statuses: list[int] = []

        async def heard(message: Any) -> None:
            statuses.extend([message["status"]] if "status" in message else [])
            answer.append(message.get("body", b""))

        await self.api(scope, _again(json.dumps(asked).encode(), None), heard)
        if statuses != [200]:
            return {"count": self.most_tokens, "max_model_len": self.most_tokens}
        found = json.loads(b"".join(answer))
        if not isinstance(found, dict):
            return {"count": self.most_tokens, "max_model_len": self.most_tokens}
        return found


async def _whole(receive: Receive) -> bytes:
    """A request's body; what came of it when its client leaves."""
    parts: list[bytes] = []
    while (message := await receive())["type"] == "http.request":
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    return b"".join(parts)


def _again(said: bytes, receive: Receive | None) -> Receive:
    """The body once more, then whatever comes."""
    messages = [{"type": "http.request", "body": said, "more_body": False}]

    async def replayed() -> Any:
        if messages:
            return messages.pop()
        if receive is None:  # nobody leaves: a route that hears of it would give no answer
            await asyncio.Event().wait()
            raise AssertionError("an event that nobody sets")
        return await receive()

    return replayed
