"""By what a picture is known."""

import asyncio
import base64
import json
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from deployments import messages
from deployments.engines import asgi
from deployments.engines.asgi import BadField
from deployments.engines.vllm.batching import callers
from deployments.engines.vllm.batching.batch_gate import RequestExpired
from deployments.engines.vllm.batching.picture_turns import PictureTurns, end_turn
from deployments.engines.vllm.pictures import picture_identity
from tests.support.archives import growth
from tests.support.drawings import drawing
from tests.support.pictures import png


@pytest.fixture
def seeing(tmp_path: Path) -> picture_identity.Pictures:
    llm: Any = SimpleNamespace(model_config=SimpleNamespace(model=str(tmp_path)))
    return picture_identity.Pictures(llm, "m", has_cache=False)


@pytest.mark.spec("H2", "L3")
def test_picture_that_no_decoder_is_made_for_is_refused_by_its_place(
    seeing: picture_identity.Pictures,
) -> None:
    """Pillow raises a TypeError for grey of 16 bits whose header says that it is interlaced."""
    raw = bytearray(png(Image.new("I;16", (8, 8), 30_000)))
    assert seeing.identity(data_uri(bytes(raw)), b"tenant", "here")
    raw[28] = 1
    raw[29:33] = zlib.crc32(raw[12:29]).to_bytes(4, "big")
    with pytest.raises(BadField) as caught:
        seeing.identity(data_uri(bytes(raw)), b"tenant", "here")
    assert caught.value.param == "here"


def a_body(*, has_picture: bool) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "what is it?"}]
    if has_picture:
        url = data_uri(png(Image.new("RGB", (8, 8), "red")))
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return {"messages": [{"role": "user", "content": parts}]}


def data_uri(raw: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(raw).decode()


@pytest.mark.spec("H8")
def test_identity_of_a_picture_takes_little_more_memory_than_its_decoded_pixels(
    seeing: picture_identity.Pictures,
) -> None:
    side = 4096
    decoded_bytes = 4 * side * side  # as Pillow has them, four bytes for each pixel
    uri = data_uri(png(Image.new("RGB", (side, side), "white")))
    with growth() as grown:
        seeing.identity(uri, b"tenant", "here")
        assert grown() < 1.5 * decoded_bytes


@pytest.mark.spec("H8")
def test_picture_that_its_file_says_is_turned_has_the_identity_of_the_turned_one(
    seeing: picture_identity.Pictures,
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: turn a quarter clockwise
    lying = drawing(1).resize((48, 32))
    uris = png(lying, exif=exif), png(lying.transpose(Image.Transpose.ROTATE_270)), png(lying)
    turned, upright, other = (seeing.identity(data_uri(u), b"tenant", "here") for u in uris)
    assert turned == upright != other


@pytest.mark.spec("H8")
async def test_pictures_of_one_request_at_a_time_are_decoded_and_processed(
    seeing: picture_identity.Pictures,
) -> None:
    entered: asyncio.Queue[asyncio.Event] = asyncio.Queue()

    async def api(scope: Any, receive: Any, send: Any) -> None:
        body = await asgi.read_body(receive)
        is_named = b'"uuid"' in (body or b"")
        await entered.put(processed := asyncio.Event())
        if is_named:
            await processed.wait()
        end_turn()  # as `generate` does, once vLLM has processed the pictures
        await answered.wait()

    def asked(*, has_picture: bool) -> "asyncio.Task[None]":
        raw = json.dumps(a_body(has_picture=has_picture)).encode()
        scope = {"path": "/v1/chat/completions", "headers": []}
        work = seeing.serve(api, scope, asgi.replay(raw, asgi.never), asgi.never)
        return asyncio.ensure_future(work)

    answered = asyncio.Event()
    requests = [asked(has_picture=True)]
    async with asyncio.timeout(60):
        first = await entered.get()
        requests.append(asked(has_picture=True))
        requests.append(asked(has_picture=False))
        await entered.get()
        assert entered.empty(), "two requests have decoded pictures at a time"
        first.set()
        (await entered.get()).set()
        answered.set()
        await asyncio.gather(*requests)


@pytest.mark.spec("H8")
async def test_turn_ends_with_a_request_whose_pictures_reach_no_model(
    seeing: picture_identity.Pictures,
) -> None:
    async def api(scope: Any, receive: Any, send: Any) -> None:
        raise ConnectionError

    raw = json.dumps(a_body(has_picture=True)).encode()
    async with asyncio.timeout(60):
        for _ in range(2):
            scope = {"path": "/v1/messages/count_tokens", "headers": []}
            with pytest.raises(ConnectionError):
                await seeing.serve(api, scope, asgi.replay(raw, asgi.never), asgi.never)


@pytest.mark.spec("H8", "F6")
async def test_turns_go_by_priority_and_end_at_a_deadline_or_when_the_client_leaves() -> None:
    turns, order = PictureTurns(), list[str]()
    left = asyncio.Event()

    async def gone() -> dict[str, Any]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def asked(name: str, priority: int, receive: Any = asgi.never, within: str = "") -> None:
        headers = {messages.PRIORITY_HEADER: str(priority), messages.DEADLINE_HEADER: within}
        callers.begin({"headers": [(k.encode(), v.encode()) for k, v in headers.items() if v]})
        if await turns.take("m", receive):
            with turns.until_end():
                order.append(name)

    async with asyncio.timeout(60):
        assert await turns.take("m", asgi.never)
        batch = asyncio.ensure_future(asked("batch", 4))
        leaves = asyncio.ensure_future(asked("leaves", 2, gone))
        late = asyncio.ensure_future(asked("late", 2, within="0.01"))
        await asyncio.sleep(0)
        urgent = asyncio.ensure_future(asked("urgent", 0))
        with pytest.raises(RequestExpired):
            await late
        left.set()
        await leaves
        cancelled = asyncio.ensure_future(asked("cancelled", 1))
        await asyncio.sleep(0)
        cancelled.cancel()
        with turns.until_end():
            end_turn()
            end_turn()
        await asyncio.gather(batch, urgent)
        assert order == ["urgent", "batch"]
        assert await turns.take("m", asgi.never), "none is left behind"
