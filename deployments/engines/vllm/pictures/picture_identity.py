"""Pictures of a chat: the identity by which vLLM caches them, and what the cache holds.

vLLM knows a picture by the hash of its file, or by what the file says of itself (EXIF's ImageID),
which a client could forge. Here the identity is a hash of the model, the tenant and the decoded
pixels, sent as the part's `uuid`: files that decode to equal pixels share an entry, and tenants
share none.
"""

import asyncio
import base64
import contextlib
import hashlib
import json
from collections.abc import Iterator
from typing import Any

from PIL import Image, ImageOps
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.multimodal.media import ImageMediaIO, connector
from vllm.multimodal.media import image as media_image
from vllm.v1.engine.async_llm import AsyncLLM

from deployments import messages
from deployments.config import model_content
from deployments.engines import asgi
from deployments.engines.asgi import BadField
from deployments.engines.one_thread import OneThread
from deployments.engines.protocol import Asgi, Receive, Scope, Send
from deployments.engines.vllm.batching.batch_gate import RequestExpired
from deployments.engines.vllm.batching.picture_turns import PictureTurns
from deployments.requests.picture_bounds import BROKEN

FACTS = "/pictures"  # GET: what the cache holds; DELETE: empties it of what no step reads
# An idle engine looks so often for pictures past their term, to give their memory back.
TICK_S = 15.0
_STRIP_BYTES = 1 << 20  # of pixels that are hashed at once: a copy of them all may be 96 MiB


def _upright(image: Image.Image) -> Image.Image:
    """The picture as its file says that it is seen. vLLM's own function copies also a picture that
    is upright, which takes its memory twice."""
    with contextlib.suppress(*BROKEN):
        ImageOps.exif_transpose(image, in_place=True)
    return image


media_image.normalize_image = _upright


class Pictures:
    """Gives each picture of a request its identity. One per engine of a model that sees.
    `has_cache`: whether the cache is ours, in a slab; else vLLM's own keeps pictures."""

    def __init__(self, llm: AsyncLLM, served_name: str, *, has_cache: bool) -> None:
        self._llm, self._served_name, self._has_cache = llm, served_name, has_cache
        self._reader = ImageMediaIO()
        self._turns = PictureTurns()
        # One thread, because it goes on with the pictures of a client that has left, when the turn
        # is another request's.
        self._decoder = OneThread("decode")
        self._model = model_content.content_of(llm.model_config.model)

    def adopt(self, state: Any) -> None:
        """Has vLLM's routes pass identities on; `state` is that of its application."""
        state.anthropic_serving_messages.__class__ = NamedMessages
        connector.global_thread_pool = self._decoder.executor

    async def serve(self, api: Asgi, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request after its pictures have their identities."""
        body = await asgi.read_body(receive)
        if body is None:
            return
        tenant = dict(scope["headers"]).get(messages.TENANT_HEADER.encode(), b"default")
        try:
            fields, pictures = await asyncio.to_thread(_read, body)
        except BadField as error:
            return await asgi.refuse_request(send, error)
        if not pictures:
            return await api(scope, asgi.replay(body, receive), send)
        try:
            if not await self._turns.take(self._served_name, receive):
                return
        except RequestExpired as error:
            return await asgi.refuse_request(send, error)
        with self._turns.until_end():
            try:
                named = await self._decoder.run(self._named, fields, pictures, tenant)
            except BadField as error:
                return await asgi.refuse_request(send, error)
            await api(scope, asgi.replay(named, receive), send)

    async def serve_facts(self, scope: Scope, send: Send) -> None:
        """Answers what the cache holds; DELETE empties it first of what no step reads."""
        if not self._has_cache:
            return await asgi.refuse(send, 404, "vLLM's own cache keeps this engine's pictures")
        if scope["method"] == "DELETE":
            await self.purge()
        facts = await self._llm.engine_core.call_utility_async("picture_facts")
        await asgi.respond(send, 200, facts)

    def check(self) -> None:
        """Raises RuntimeError when a picture has hung in its decoder."""
        self._decoder.check()

    async def purge(self) -> None:
        """Drops every projected picture that no step reads."""
        if self._has_cache:
            await self._llm.engine_core.call_utility_async("purge_pictures")

    async def expire(self) -> None:
        """Runs as long as the engine, because a cache without requests must not keep pictures."""
        while self._has_cache:
            await asyncio.sleep(TICK_S)
            await self._llm.engine_core.call_utility_async("expire_pictures")

    def _named(self, fields: Any, pictures: "list[Picture]", tenant: bytes) -> bytes:
        """The body with a uuid on each picture. Raises BadField."""
        for place, owner, url in pictures:
            owner["uuid"] = self.identity(url, tenant, place)
        return json.dumps(fields).encode()

    def identity(self, url: Any, tenant: bytes, place: str) -> str:
        """The identity of one picture: the pixels that vLLM's own reader will give. Raises
        BadField."""
        if not isinstance(url, str) or not url[:5].lower() == "data:":
            raise _bad(place, "pictures come as data: URIs")
        try:
            data = base64.b64decode(url.partition(",")[2], validate=True)
            pixels = self._reader.load_bytes(data).media
        except BROKEN as error:
            raise _bad(place, f"cannot be decoded: {error}") from error
        digest = hashlib.sha256(f"{self._model} {pixels.mode} {pixels.size} ".encode())
        digest.update(hashlib.sha256(tenant).digest())
        for strip in _strips(pixels):
            digest.update(strip.tobytes())
        return digest.hexdigest()


def _strips(pixels: Image.Image) -> Iterator[Image.Image]:
    """Yields the rows of an RGB picture, from above, in strips of about _STRIP_BYTES."""
    height = max(1, _STRIP_BYTES // (3 * pixels.width))
    for top in range(0, pixels.height, height):
        yield pixels.crop((0, top, pixels.width, min(top + height, pixels.height)))


def _bad(place: str, why: str) -> BadField:
    """Returns the error of a picture that cannot be read. `place`: as
    `messages[0].content[1].image_url`."""
    return BadField(place, f"`{place}`: {why}")


Picture = tuple[str, dict[str, Any], Any]  # its place, what takes the uuid, its data: URI


def _read(body: bytes) -> tuple[Any, list[Picture]]:
    """The fields of a body, and its pictures. Raises BadField."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None, []  # vLLM says what is wrong with it
    return fields, list(_pictures(fields))


def _pictures(fields: Any) -> Iterator[Picture]:
    chat = fields.get("messages") if isinstance(fields, dict) else None
    for number, message in enumerate(chat if isinstance(chat, list) else ()):
        yield from _pictures_of(message, f"messages[{number}]")


def _pictures_of(owner: Any, place: str) -> Iterator[Picture]:
    """OpenAI's parts, and Anthropic's blocks, of which results of tools have blocks again."""
    content = owner.get("content") if isinstance(owner, dict) else None
    for index, part in enumerate(content if isinstance(content, list) else ()):
        field = f"{place}.content[{index}]"
        if not isinstance(part, dict):
            continue
        if "image_url" in part:
            url = part["image_url"]
            yield f"{field}.image_url", part, url.get("url") if isinstance(url, dict) else url
        elif part.get("type") == "image":
            source = part.get("source")
            if not isinstance(source, dict):
                raise _bad(f"{field}.source", "is no object")
            yield f"{field}.source", source, _uri(source)
        elif part.get("type") == "tool_result":
            yield from _pictures_of(part, field)


def _uri(source: dict[str, Any]) -> str:
    """Returns the URI as vLLM will make it of a block's source: what is no base64 is a URL
    there."""
    return AnthropicServingMessages._convert_image_source_to_url(source)


class NamedMessages(AnthropicServingMessages):
    """vLLM's handler of Anthropic's messages, which makes OpenAI's parts of blocks and drops what a
    source says besides; here the parts keep the identities of their sources."""

    @classmethod
    def _convert_messages(
        cls, messages: list[Any], openai_messages: list[dict[str, Any]], **more: Any
    ) -> None:
        super()._convert_messages(messages, openai_messages, **more)
        plain = {"messages": [message.model_dump() for message in messages]}
        names = {url: source["uuid"] for _, source, url in _pictures(plain)}
        for _, part, url in _pictures({"messages": openai_messages}):
            part["uuid"] = names[url]
