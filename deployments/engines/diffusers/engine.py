"""Pictures through diffusers, in OpenAI's shapes: from text, from a picture, into a masked part.

`engine_args`: `device` (default: a GPU when there is one, else cpu), `dtype` (float32 on a CPU,
bfloat16 on a GPU), `variant` (of the weights' files, as `fp16`), `steps` and `guidance` (where a
request says nothing), `max_steps` (100), `max_pixels` (width times height; default: the size that
the model was trained for), `max_batch` (pictures drawn together, 4), `vae_tiling` (the autoencoder
works in tiles: large pictures in little memory), `threads` (of torch on the CPU; default: the
model's, else 1).
"""

import asyncio
import base64
import json
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import torch

from arbiter.errors import RequestError
from deployments import messages
from deployments.engines import asgi, dispatch_lock, forms, host_copy
from deployments.engines.asgi import BadField
from deployments.engines.diffusers import picture_files, requests
from deployments.engines.diffusers.adapters import AdapterResolver
from deployments.engines.diffusers.batches import (
    Batches,
    DrawnPicture,
    DrawRequest,
    Event,
    Preview,
    Step,
)
from deployments.engines.diffusers.pipeline import Pipeline
from deployments.engines.forms import Form
from deployments.engines.one_thread import OneThread
from deployments.engines.protocol import Config, Receive, Scope, Send
from deployments.requests.image_fields import ImageFields, VariationFields

GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"
VARIATIONS = "/v1/images/variations"
# Of the events of a stream
_NAMES = {GENERATIONS: "image_generation", EDITS: "image_edit", VARIATIONS: "image_variation"}


def build(config: Config) -> "DiffusersEngine":
    return DiffusersEngine(config)


class DiffusersEngine:
    """One model, one worker thread, one queue."""

    def __init__(self, config: Config) -> None:
        args = config.get("engine_args", {})
        self.name = str(config.get("served_name", config["model"]))
        self.can_sleep: bool = config.get("can_sleep", True)
        self.config = config
        slots = config.get("adapters", {}).get("slots", 0)
        threads = args.get("threads", config.get("threads", 1))
        self.pipeline = Pipeline(config["model"], args, threads, slots)
        self.dispatch_lock = dispatch_lock.DispatchLock(config.get("dispatch_lock"))
        self.batches = Batches(self._draw, args.get("max_batch", 4))
        # One thread, because an upload is 64 MiB once it is decoded, until it is reduced.
        self.decoder = OneThread("decode")
        self.adapters: AdapterResolver | None = None
        self.parked: host_copy.HostCopy | None = None
        self.removed_tenants: list[str] = []  # removed while the engine was asleep
        self.running: asyncio.Task[None] | None = None

    async def load(self) -> None:
        """Loads the model. A second call, after a wake that did not verify, keeps worker and
        batching task."""
        if "adapters" in self.config:
            self.adapters = AdapterResolver(self.config)
        await self.batches.work(self.pipeline.load)
        if self.running is None or self.running.done():
            self.running = asyncio.create_task(self.batches.run())

    def _draw(self, *args: Any) -> Any:
        with self.batches.worker.holding(self.dispatch_lock.one()):
            return self.pipeline.draw(*args)

    async def sleep(self) -> None:
        parked = host_copy.offload, self.pipeline.modules, self.name, self.config
        self.parked = await self.batches.work(*parked)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    async def wake(self) -> None:
        assert self.parked is not None
        await self.batches.work(host_copy.restore, self.parked)
        self.parked = None
        for tenant in self.removed_tenants:
            await self.forget_tenant(tenant)
        self.removed_tenants.clear()

    async def forget_tenant(self, tenant: str) -> None:
        """Drops the tenant's adapters after the batch under way. Of an asleep model the wake drops
        them, because the copy of its weights has a place for each tensor that was offloaded."""
        if self.parked is not None:
            self.removed_tenants.append(tenant)
        else:
            await self.batches.work(self.pipeline.forget_tenant, tenant)

    async def probe(self) -> str:
        return str(await self.batches.work(self.pipeline.probe))

    async def health(self) -> None:
        assert self.running and not self.running.done(), "the batching task has ended"
        self.batches.worker.check()
        self.decoder.check()

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/v1/models":
            card = {"id": self.name, "object": "model", "owned_by": "serve-arbiter", "created": 0}
            return await asgi.respond(send, 200, {"object": "list", "data": [card]})
        if path == messages.ADAPTERS and self.adapters is not None:
            return await self._tell_tiers(self.adapters, scope, receive, send)
        if path not in _NAMES or scope["method"] != "POST":
            return await asgi.refuse(send, 404, f"no route {scope['method']} {path}")
        try:
            parsed = await self._parsed(scope, receive)
            if parsed is None:
                return
            response = Response(self, path, *parsed)
            if response.fields.stream:
                await asgi.until_disconnected(response.stream(send), receive)
            elif body := await asgi.until_disconnected(response.whole(), receive):
                await asgi.respond(send, 200, body)
        except RequestError as error:
            await asgi.refuse_request(send, error)

    async def _tell_tiers(
        self, adapters: AdapterResolver, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answers messages.ADAPTERS. Pictures keep no adapter in the pool: none is warm."""
        raw = await asgi.read_body(receive)
        if raw is None:
            return
        tenant = dict(scope["headers"]).get(messages.TENANT_HEADER.encode(), b"").decode("latin-1")
        folders = await adapters.published(asgi.json_object(raw)["names"], tenant)
        hot = self.pipeline.adapters.folders
        tiers = {name: "hot" if folder in hot else "cold" for name, folder in folders.items()}
        await asgi.respond(send, 200, {"tiers": tiers})

    async def _parsed(
        self, scope: Scope, receive: Receive
    ) -> tuple[ImageFields, DrawRequest] | None:
        """Reads the fields of a request, and what is to be drawn for it; None: the client has left.
        Raises RequestError."""
        headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
        tenant = headers.get(messages.TENANT_HEADER, "")
        if scope["path"] in (EDITS, VARIATIONS):
            form = await forms.read(scope, receive)
            if form is None:
                return None
            raw_fields: dict[str, Any] = {name: values[-1] for name, values in form.texts.items()}
            raw_fields["model"] = headers.get(messages.SERVED_HEADER, raw_fields.get("model", ""))
        else:
            raw = await asgi.read_body(receive)
            if raw is None:
                return None
            form, raw_fields = None, asgi.json_object(raw)
        kind = VariationFields if scope["path"] == VARIATIONS else ImageFields
        fields = requests.fields_of(raw_fields, kind)
        return fields, await self._draw_request(
            fields, form, str(raw_fields.get("model", "")), tenant
        )

    async def _draw_request(
        self, fields: ImageFields, form: Form | None, name: str, tenant: str
    ) -> DrawRequest:
        """Raises RequestError."""
        limits, edit = self.pipeline.limits, None
        adapter = await self._adapter(name, tenant)
        if form is not None:
            edit = await self.decoder.run(requests.edit_of, form, fields, limits)
        setting = requests.setting_of(fields, limits, adapter, edit)
        seed = secrets.randbits(32) if fields.x_seed is None else fields.x_seed
        seeds = range(seed, seed + (fields.n or 1))
        previews = fields.partial_images or 0 if fields.stream else 0
        return DrawRequest(setting, fields.prompt, fields.x_negative_prompt or "", seeds, previews)

    async def _adapter(self, name: str, tenant: str) -> str:
        """The folder of the adapter that a request names; empty: the base. Raises RequestError."""
        if name in ("", self.name):
            return ""
        folder = await self.adapters.folder(name, tenant) if self.adapters else ""
        if not folder:
            raise BadField("model", f"{name!r} is neither {self.name!r} nor one of its adapters")
        return folder


class Response:
    """One request's answer: whole, or as events."""

    def __init__(
        self, engine: DiffusersEngine, path: str, fields: ImageFields, request: DrawRequest
    ) -> None:
        self.engine, self.fields, self.request = engine, fields, request
        self.kind = _NAMES[path]
        self.format = fields.output_format or "png"

    async def whole(self) -> dict[str, Any]:
        """OpenAI's ImagesResponse, with each picture's seed. Raises DrawingFailed."""
        pictures: dict[int, str] = {}
        async with aclosing(self._events()) as events:
            async for event in events:
                if isinstance(event, DrawnPicture):
                    pictures[event.number] = await self._encoded(event)
        seeds = self.request.seeds
        data = [{"b64_json": pictures[i], "x_seed": seed} for i, seed in enumerate(seeds)]
        return {"created": int(time.time()), "data": data, **self._facts(len(data))}

    async def stream(self, send: Send) -> None:
        """Partial and completed pictures as server-sent events, and steps as comments of the
        stream, which clients skip."""
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async with aclosing(self._events()) as events:
                async for event in events:
                    line = await self._line(event)
                    await send({"type": "http.response.body", "body": line, "more_body": True})
        except RequestError as error:
            last = messages.stream_error(error)
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def _events(self) -> AsyncGenerator[Event, None]:
        return self.engine.batches.events(self.request)

    async def _line(self, event: Event) -> bytes:
        match event:
            case Step():
                return f": picture={event.number} step={event.step} of={event.of}\n\n".encode()
            case Preview():
                fields = {"partial_image_index": event.index, **self._facts(0)}
                name = f"{self.kind}.partial_image"
            case DrawnPicture():
                fields = {"x_seed": self.request.seeds[event.number], **self._facts(1)}
                name = f"{self.kind}.completed"
        more = {"b64_json": await self._encoded(event), "created_at": int(time.time())}
        fields |= {"type": name, "x_picture": event.number, **more}
        return f"event: {name}\ndata: {json.dumps(fields)}\n\n".encode()

    async def _encoded(self, event: DrawnPicture | Preview) -> str:
        quality = self.fields.output_compression
        raw = await asyncio.to_thread(picture_files.encode, event.image, self.format, quality)
        return base64.b64encode(raw).decode()

    def _facts(self, pictures: int) -> dict[str, Any]:
        """What the answer says of all its pictures; `pictures`: how many usage counts."""
        setting = self.request.setting
        fields: dict[str, Any] = {
            "size": f"{setting.width}x{setting.height}",
            "output_format": self.format,
            "background": "opaque",
            "quality": "auto",
        }
        if pictures:
            fields["usage"] = self._usage(pictures)
        return fields

    def _usage(self, pictures: int) -> dict[str, Any]:
        """Tokens of the prompt, and places of latents for what OpenAI counts as image tokens."""
        setting, pipeline = self.request.setting, self.engine.pipeline
        text = pipeline.tokens(self.fields.prompt)
        places = setting.width * setting.height // pipeline.pipe.vae_scale_factor**2
        output = pictures * places
        return {
            "input_tokens": text,
            "input_tokens_details": {"text_tokens": text, "image_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"text_tokens": 0, "image_tokens": output},
            "total_tokens": text + output,
        }
