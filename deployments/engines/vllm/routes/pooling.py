"""Rerank, score and classify in the forms that clients have, over vLLM's pooling routes.

Beside vLLM's own (Jina's), `documents` may be objects with a `text`, `return_documents: false`
leaves them out of the answer, and `texts` in place of `documents` is the form of
text-embeddings-inference (TEI): its answer is a list of {"index", "score"}, best first.

Sources: docs.cohere.com/reference/rerank, jina.ai/reranker, huggingface.github.io/text-embeddings-
inference.
"""

import json
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from deployments.engines import asgi
from deployments.engines.protocol import Receive, Scope, Send

# Of each path: the name under vLLM's application, and the part of its state that answers. vLLM
# routes some paths that a model then cannot answer.
HANDLERS: dict[str, tuple[str, str]] = {
    "/v1/rerank": ("/rerank", "serving_scores"),
    "/v2/rerank": ("/rerank", "serving_scores"),
    "/rerank": ("/rerank", "serving_scores"),
    "/v1/score": ("/score", "serving_scores"),
    "/score": ("/score", "serving_scores"),
    "/v1/classify": ("/classify", "serving_classification"),
    "/classify": ("/classify", "serving_classification"),
    "/v1/embeddings": ("/v1/embeddings", "serving_embedding"),
}
CUT_TO_FIT = -1  # vLLM's `truncate_prompt_tokens` for the model's whole context


@dataclass(frozen=True, slots=True)
class Form:
    """How a request for a rerank wants its answer."""

    is_tei: bool = False
    with_text: bool = True

    def answer(self, reply: dict[str, Any]) -> Any:
        """The answer to the client, from vLLM's."""
        if self.is_tei:
            return [self._row(result) for result in reply["results"]]
        if not self.with_text:
            for result in reply["results"]:
                del result["document"]
        return reply

    def _row(self, result: dict[str, Any]) -> dict[str, Any]:
        text = {"text": result["document"]["text"]} if self.with_text else {}
        return {"index": result["index"], "score": result["relevance_score"], **text}


async def serve(api: FastAPI, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a path of HANDLERS."""
    path, handler = HANDLERS[scope["path"]]
    if getattr(api.state, handler, None) is None:
        served = ", ".join(p for p, (_, h) in HANDLERS.items() if getattr(api.state, h, None))
        return await asgi.refuse(
            send, 400, f"this model does not answer {scope['path']}, but {served}", param="model"
        )
    scope = {**scope, "path": path, "raw_path": path.encode()}
    if path == "/rerank":
        return await _rerank(api, scope, receive, send)
    await api(scope, receive, send)


async def _rerank(api: FastAPI, scope: Scope, receive: Receive, send: Send) -> None:
    body = await asgi.read_body(receive)
    if body is None:
        return
    try:
        fields = asgi.json_object(body)
    except asgi.BadField as error:
        return await asgi.refuse_request(send, error)
    form = to_vllm(fields)
    caught = CapturedResponse()
    await api(scope, asgi.replay(json.dumps(fields).encode(), receive), caught)
    if caught.status == 200:
        await asgi.respond(send, 200, form.answer(json.loads(caught.body)))
    else:
        await caught.pass_on(send)


def to_vllm(fields: dict[str, Any]) -> Form:
    """Changes the fields of any form of rerank to vLLM's; returns how it is to be answered."""
    if "texts" in fields:
        fields["documents"] = fields.pop("texts")
        side = str(fields.pop("truncation_direction", None) or "Right").lower()
        if fields.pop("truncate", False):
            fields |= {"truncate_prompt_tokens": CUT_TO_FIT, "truncation_side": side}
        if fields.pop("raw_scores", False):
            fields["use_activation"] = False
        return Form(is_tei=True, with_text=fields.pop("return_text", None) is True)
    documents = fields.get("documents")
    if isinstance(documents, list):
        fields["documents"] = [d["text"] if _is_document(d) else d for d in documents]
    return Form(with_text=fields.pop("return_documents", None) is not False)


def _is_document(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("text"), str)


class CapturedResponse:
    """A `send` that keeps what an application answers."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    async def __call__(self, message: Any) -> None:
        self.messages.append(message)

    @property
    def status(self) -> int:
        """0 where the application answered nothing: the client had left."""
        return int(self.messages[0]["status"]) if self.messages else 0

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    async def pass_on(self, send: Send) -> None:
        for message in self.messages:
            await send(message)
