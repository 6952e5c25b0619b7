"""POST /prewarm: computes the KV of a chat's stable prefix by a request of one token (G1).

vLLM itself renders the prefix with several endings, as it will render the real request, and what
all the renderings begin with is computed (deployments.engines.vllm.routes.chat_endings).
"""

import itertools
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI
from jinja2 import TemplateError
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.inputs import TokensPrompt
from vllm.v1.engine.async_llm import AsyncLLM

from arbiter.errors import RequestError
from deployments.engines import asgi
from deployments.engines.asgi import BadField
from deployments.engines.protocol import Receive, Scope, Send
from deployments.engines.vllm.routes.chat_endings import Chat, common, endings
from deployments.requests import prefixes

NO_CACHE = {"skipped": "prefix caching is off", "has_no_cache": True}
_GREEDY = SamplingParams(temperature=0, max_tokens=1)


class Prewarmer:
    """An ASGI application in the place of vLLM's own, for one path. Whose model a request names,
    and when it enters the batch, is decided where every request's is."""

    def __init__(self, llm: AsyncLLM, config: VllmConfig, api: FastAPI) -> None:
        self.llm, self.config, self.api = llm, config, api
        self._numbers = itertools.count()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers what deployments.replica.prefixes.prefix_warmer.Warmed has."""
        body = await asgi.read_body(receive)
        if body is None:
            return
        try:
            prefix = asgi.json_object(body)
            reply = await asgi.until_disconnected(self._warm(prefix), receive)
        except RequestError as error:
            return await asgi.refuse_request(send, error)
        if reply is not None:
            await asgi.respond(send, 200, reply)

    async def _warm(self, prefix: Chat) -> dict[str, Any]:
        """Raises BadField."""
        if not self.config.cache_config.enable_prefix_caching:
            return NO_CACHE
        tokens = await self.tokens(prefix)
        least = self.config.cache_config.block_size
        if len(tokens) < least:
            why = f"{len(tokens)} tokens; blocks have {least}, and only whole ones are cached"
            return {"skipped": why}
        models, model = self.api.state.openai_serving_models, prefix["model"]
        adapters = models.lora_requests
        lora = adapters[model] if model in adapters else None
        prompt = TokensPrompt(prompt_token_ids=tokens)
        if salt := prefix.get("cache_salt"):
            prompt["cache_salt"] = salt
        number = f"prewarm-{next(self._numbers)}"
        cached = 0
        params = _GREEDY.clone()
        if term := prefix.get(prefixes.TERM):
            params.extra_args = {prefixes.TERM: term}
        outputs = self.llm.generate(prompt, params, number, lora_request=lora)
        async with aclosing(outputs):
            async for output in outputs:
                cached = output.num_cached_tokens or 0
        return {"prompt_tokens": len(tokens), "cached_tokens": cached}

    async def tokens(self, prefix: Chat) -> list[int]:
        """What all chats that go on from the prefix begin with. Raises BadField where vLLM renders
        none of them."""
        roles = dict.fromkeys((prefix.get("next_role") or "user", "user", "assistant"))
        refused: BadField | None = None
        for role in roles:  # templates refuse some orders of roles
            try:
                return common([await self._render(chat) for chat in endings(prefix, role)])
            except BadField as error:
                refused = refused or error
        assert refused is not None
        raise refused

    async def _render(self, chat: Chat) -> list[int]:
        """Raises BadField."""
        try:
            request = ChatCompletionRequest.model_validate(chat)
            answer = await self.api.state.openai_serving_chat.render_chat_request(request)
        except (ValueError, TypeError, LookupError, TemplateError) as error:
            raise BadField("messages", f"vLLM cannot render the prefix: {error}") from error
        if isinstance(answer, ErrorResponse):
            raise BadField("messages", answer.error.message)
        _, [rendered] = answer
        tokens: list[int] = rendered["prompt_token_ids"]
        return tokens
