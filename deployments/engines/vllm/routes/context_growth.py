"""Whether a request that vLLM refused would fit the longer context that its model may grow to
(A14). A refusal is marked only when the request's length is known to fit, so that no client can
restart an engine with a request that the grown engine refuses again.
"""

import json
import re
from math import inf
from typing import Any

from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts

from deployments.engines import asgi
from deployments.engines.protocol import COULD_GROW, Asgi, Receive, Scope, Send

# The fields of a chat that decide how many tokens its prompt has, as vLLM's `/tokenize` counts
# them.
_CHAT = (
    "messages",
    "tools",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
)
# The routes that may grow a model, each with the fields that bound the length of its answer.
_MOST = {
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
}
# vLLM's words for "too long". A longer context would not change any other refusal.
_TOO_LONG = re.compile(r"context length|max_model_len", re.IGNORECASE)

Body = dict[str, Any]


class PromptUncountable(Exception):
    """vLLM cannot count the prompt's tokens; its refusal says what is wrong with the request."""


class PromptTooLong(Exception):
    """The prompt has more characters than the grown context has in tokens, whatever these are."""


class ContextGrowth:
    """Stands between the host and vLLM's own application. `most_tokens`: the context once grown.
    `token_characters`: of the longest token, by which a prompt is refused before it is tokenized,
    as vLLM does: 4 MiB of text take seconds and 1 GiB."""

    def __init__(
        self, api: Asgi, model: str, most_tokens: int, token_characters: float = inf
    ) -> None:
        self.api, self.model, self.most_tokens = api, model, most_tokens
        self.most_characters = most_tokens * token_characters

    async def serve(self, app: Asgi, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers as `app` does, and marks a refusal that growth would avoid."""
        if scope["path"] not in _MOST:
            return await app(scope, receive, send)
        raw = await asgi.read_body(receive)
        if raw is None:
            return
        start: Any = None
        refusal = b""

        async def judging(message: Any) -> None:
            nonlocal start, refusal
            if message["type"] == "http.response.start" and message["status"] == 400:
                start = message
            elif start is None:
                await send(message)
            else:
                refusal += message.get("body", b"")
                if not message.get("more_body"):
                    refused = start, refusal
                    await self._refuse(scope["path"], raw, refused, receive, send)

        await app(scope, asgi.replay(raw, receive), judging)

    async def _refuse(
        self, path: str, raw: bytes, refused: tuple[Any, bytes], receive: Receive, send: Send
    ) -> None:
        """Passes vLLM's refusal on. `refused`: its head and its body."""
        start, refusal = refused
        headers = list(start["headers"])
        needed: float | None
        if _TOO_LONG.search(refusal.decode(errors="replace")):
            try:
                needed = await self._needed(path, json.loads(raw), receive)
            except PromptTooLong:
                needed = inf
            except (
                PromptUncountable,
                LookupError,
                ValueError,
                TypeError,
                AttributeError,
                OverflowError,
            ):
                needed = None  # the refusal says what is wrong with the request
            if needed is not None and needed <= self.most_tokens:
                headers.append((COULD_GROW.encode(), b"context"))
            elif needed is not None:
                refusal = _with_most(refusal, needed, self.most_tokens)
        headers = [(name, value) for name, value in headers if name.lower() != b"content-length"]
        headers.append((b"content-length", str(len(refusal)).encode()))
        await send({**start, "headers": headers})
        await send({"type": "http.response.body", "body": refusal})

    async def _needed(self, path: str, body: Body, receive: Receive) -> float:
        """The context in tokens in which vLLM would answer: the longest prompt and one token, or
        the longest answer that the request allows, whichever is more; where both together exceed
        the context, vLLM shortens the answer. Raises PromptUncountable, PromptTooLong, and whatever
        a body of another shape raises."""
        most_answered = max(int(body.get(name) or 1) for name in _MOST[path])
        return max(most_answered, 1 + await self._length(path, body, receive))

    async def _length(self, path: str, body: Body, receive: Receive) -> int:
        if path == "/v1/responses":
            return await self._counted(_as_chat(body), receive)
        if path == "/v1/chat/completions":
            return await self._counted({k: body[k] for k in _CHAT if k in body}, receive)
        special = {k: body[k] for k in ("add_special_tokens",) if k in body}
        prompts = _prompts(body["prompt"])
        self._check_characters(max((len(p) for p in prompts if isinstance(p, str)), default=0))
        lengths = [
            await self._counted({"prompt": p, **special}, receive) if isinstance(p, str) else len(p)
            for p in prompts
        ]
        return max(lengths)

    def _check_characters(self, count: int) -> None:
        """Raises PromptTooLong."""
        if count > self.most_characters:
            raise PromptTooLong(count)

    async def _counted(self, body: Body, receive: Receive) -> int:
        """Tokens of a prompt. Raises PromptUncountable, PromptTooLong."""
        self._check_characters(_characters(body.get("messages")))
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/tokenize",
            "raw_path": b"/tokenize",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "http_version": "1.1",
            "scheme": "http",
            "root_path": "",
            "client": None,
            "server": None,
        }
        answer: list[bytes] = []
        statuses: list[int] = []

        async def heard(message: Any) -> None:
            statuses.extend([message["status"]] if "status" in message else [])
            answer.append(message.get("body", b""))

        raw = json.dumps({"model": self.model, **body}).encode()
        await self.api(scope, asgi.replay(raw, receive), heard)
        if statuses != [200]:
            raise PromptUncountable(statuses)
        return int(json.loads(b"".join(answer))["count"])


def _characters(messages: Any) -> int:
    """The characters of all texts of a chat."""
    contents = [m.get("content") for m in messages or () if isinstance(m, dict)]
    texts = [content for content in contents if isinstance(content, str)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    texts += [part["text"] for part in parts if isinstance(part, dict) and "text" in part]
    return sum(len(text) for text in texts)


def _as_chat(body: Body) -> Body:
    """A call of `/v1/responses` as vLLM itself puts it to the chat template. Raises
    ValidationError."""
    request = ResponsesRequest.model_validate(body)
    messages = construct_input_messages(
        request_instructions=request.instructions, request_input=request.input
    )
    tools = construct_tool_dicts(request.tools, request.tool_choice)
    options = {"tools": tools, "chat_template_kwargs": request.chat_template_kwargs}
    fields = {name: value for name, value in options.items() if value}
    return {"messages": [_as_message(m) for m in messages], **fields}


def _as_message(message: Any) -> Body:
    """A message whose texts have the type that `/tokenize` knows."""
    plain: Body = message if isinstance(message, dict) else message.model_dump(exclude_none=True)
    parts = plain.get("content")
    if isinstance(parts, list):
        texts = ("input_text", "output_text")
        kinds = [p | {"type": "text"} if p.get("type") in texts else p for p in parts]
        return {**plain, "content": kinds}
    return plain


def _prompts(prompt: Any) -> list[str] | list[list[int]]:
    """The prompts of a completion: text or tokens, one or several. Raises ValueError on anything
    else."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        one: list[list[int]] = [prompt]
        return one if isinstance(prompt[0], int) else prompt
    raise ValueError(prompt)


def _with_most(refusal: bytes, needed: float, most_tokens: int) -> bytes:
    """Adds the context that the model may grow to, because vLLM's refusal names the present one.
    `needed`: inf where it was not counted and is more."""
    body = json.loads(refusal)
    body["error"]["message"] += (
        f" The model may grow to {most_tokens} tokens; the request needs"
        f" {'more' if needed == inf else needed}."
    )
    return json.dumps(body).encode()
