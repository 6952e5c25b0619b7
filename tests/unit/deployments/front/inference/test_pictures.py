"""Which parts of messages pass the front: bitmaps as data: URIs within bounds, without a uuid."""

import base64
import io
import json
import zlib
from typing import Any

import pytest
from PIL import Image

from deployments.front.inference import pictures
from deployments.front.inference.request import BadRequest, ParsedRequest, parse
from deployments.requests import picture_bounds

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'


def uri(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def drawn(form: str = "PNG", size: tuple[int, int] = (8, 8)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, "red").save(buffer, form)
    return buffer.getvalue()


def declared(width: int, height: int) -> bytes:
    """A PNG whose header promises pixels that it does not have."""
    made = bytearray(drawn())
    made[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    made[29:33] = zlib.crc32(made[12:29]).to_bytes(4, "big")
    return bytes(made)


@pytest.mark.spec("L2")
@pytest.mark.parametrize(
    ("kind", "more"),
    [("JPEG", {}), ("MPO", {"save_all": True, "append_images": [Image.new("RGB", (8, 8))]})],
)
def test_jpeg_that_repeats_its_scans_is_refused(kind: str, more: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(buffer, kind, progressive=True, **more)
    raw = buffer.getvalue()
    begin, end = raw.index(b"\xff\xda"), raw.index(b"\xff\xd9")
    bomb = raw[:end] + raw[begin:end] * picture_bounds.MAX_SCANS + raw[end:]
    assert pictures.size_of(raw, "here") == (8, 8)
    with pytest.raises(pictures.BadPart, match="scans"):
        pictures.size_of(bomb, "here")


@pytest.mark.spec("H2", "L3")
def test_grey_of_sixteen_bits_which_engines_would_read_as_white_is_refused() -> None:
    buffer = io.BytesIO()
    Image.new("I;16", (8, 8), 30_000).save(buffer, "PNG")
    with pytest.raises(pictures.BadPart, match="16 bits"):
        pictures.size_of(buffer.getvalue(), "here")


@pytest.mark.spec("L3")
def test_refusal_of_what_is_no_picture_has_no_address_of_this_process() -> None:
    with pytest.raises(pictures.BadPart, match="PNG, JPEG, WEBP, GIF, BMP") as caught:
        pictures.size_of(SVG, "here")
    assert "0x" not in str(caught.value)


def picture(url: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def body(*parts: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}]}


async def read(fields: dict[str, Any], path: str = CHAT) -> ParsedRequest:
    return await parse(path, json.dumps(fields).encode(), {}, {})


async def refused(fields: dict[str, Any], path: str = CHAT) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        await read(fields, path)
    assert caught.value.status_code == 400
    return caught.value


@pytest.mark.spec("H2", "L2")
@pytest.mark.parametrize(
    ("form", "kind"),
    [("PNG", "png"), ("JPEG", "jpeg"), ("JPEG", "jpg"), ("WEBP", "webp"), ("GIF", "gif"),
     ("BMP", "bmp")],
)  # fmt: skip
async def test_bitmaps_as_data_uris_pass_unchanged(form: str, kind: str) -> None:
    fields = body({"type": "text", "text": "which?"}, picture(uri(drawn(form), kind)))
    asked = await read(fields)
    assert asked.fields == fields
    assert json.loads(asked.raw) == fields


@pytest.mark.spec("L2", "H8")
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
async def test_uuid_of_any_part_of_any_message_is_dropped(role: str) -> None:
    parts = [{"type": "text", "text": "a", "uuid": "k"}, picture(uri(drawn()), uuid="k")]
    fields = {"model": "m", "messages": [{"role": role, "content": parts}] * 2}
    asked = await read(fields)
    assert b"uuid" not in asked.raw
    assert json.loads(asked.raw) == asked.fields


@pytest.mark.spec("L2", "L3")
@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/x.png", "https://example.org/x.png", "file:///etc/passwd",
        "HTTP://example.org/x.png", " data:image/png;base64,AAAA", "data:text/html;base64,AAAA",
        "data:image/png,AAAA", "data:image/png;base64,not base64", "data:image/png;base64,",
        "", 7, None, {"url": "data:"},
        uri(SVG), uri(SVG, "svg+xml"), uri(drawn()[:20]), uri(b"GIF89a"), uri(b"\x80\x04pickle"),
        uri(drawn("TIFF")), uri(drawn("PDF")), uri(drawn("EPS")),
    ],
)  # fmt: skip
async def test_everything_but_a_bitmap_is_400_and_names_the_part(url: Any) -> None:
    error = await refused(body({"type": "text", "text": "which?"}, picture(url)))
    assert error.param == "messages[0].content[1].image_url"
    assert error.param in str(error)


MESSAGES = "/v1/messages"


def block(data: Any = None, kind: str = "png", **more: Any) -> dict[str, Any]:
    """A picture in Anthropic's form."""
    data = base64.b64encode(drawn()).decode() if data is None else data
    source = {"type": "base64", "media_type": f"image/{kind}", "data": data}
    return {"type": "image", "source": source | more}


@pytest.mark.spec("J1", "H2", "L2")
@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
async def test_anthropics_blocks_of_bitmaps_pass(path: str) -> None:
    said: dict[str, Any] = {"type": "text", "text": "which?"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block()]}
    fields = body(said, block(), {**block(), "cache_control": {"type": "ephemeral"}}, result)
    asked = await read(fields | {"max_tokens": 3}, path)
    assert asked.fields == fields | {"max_tokens": 3}


@pytest.mark.spec("J1", "L2", "L3")
@pytest.mark.parametrize(
    ("part", "field"),
    [
        (block(type="url", url="https://example.org/x.png"), "source"),
        ({"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/x"}}, "source"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "source"),
        ({"type": "image", "source": {"media_type": "image/png", "data": "AAAA"}}, "source"),
        ({"type": "image", "source": "AAAA"}, "source"),
        ({"type": "image"}, "source"),
        (block(uuid="mine"), "source.uuid"),
        (block("not base64"), "source"),
        (block(base64.b64encode(SVG).decode(), "svg+xml"), "source"),
        (block(base64.b64encode(SVG).decode()), "source"),
        (block(base64.b64encode(declared(8_000, 8_000)).decode()), "source"),
        ({**block(), "image_url": {"url": uri(drawn())}}, "image_url"),
        ({"type": "document", "source": {"type": "base64", "data": "AAAA"}}, "source"),
        (picture(uri(drawn())), "image_url"),
    ],
)
async def test_other_blocks_of_anthropics_are_400_and_named(
    part: dict[str, Any], field: str
) -> None:
    error = await refused(body(part) | {"max_tokens": 3}, MESSAGES)
    assert error.param == f"messages[0].content[0].{field}"
    nested = {"type": "tool_result", "tool_use_id": "t", "content": [part]}
    error = await refused(body(nested) | {"max_tokens": 3}, MESSAGES)
    assert error.param == f"messages[0].content[0].content[0].{field}"


@pytest.mark.spec("L2")
async def test_anthropics_blocks_are_no_pictures_of_openais_chat() -> None:
    assert (await refused(body(block()))).param == "messages[0].content[0].image"


@pytest.mark.spec("L2", "L3")
@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "image_embeds", "image_embeds": "AAAA"}, "image_embeds"),
        ({"type": "prompt_embeds", "data": "AAAA"}, "prompt_embeds"),
        ({"type": "video_url", "video_url": {"url": "http://a/b.mp4"}}, "video_url"),
        ({"type": "audio_url", "audio_url": {"url": "http://a/b.wav"}}, "audio_url"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA"}}, "input_audio"),
        ({"type": "input_image", "image_url": "http://a/b.png"}, "input_image"),
        # vLLM knows a part without a type by its keys.
        ({"video_url": "http://a/b.mp4"}, "video_url"),
        ({"image_url": "http://a/b.png"}, "image_url"),
        ({"type": "text", "text": "a", "image_url": "http://a/b.png"}, "image_url"),
        ({"type": ["text"], "image_url": "http://a/b.png"}, "image_url"),
    ],
)
async def test_other_media_are_400_and_named(part: dict[str, Any], field: str) -> None:
    assert (await refused(body(part))).param == f"messages[0].content[0].{field}"
    lone = {"model": "m", "messages": [{"role": "user", "content": part}]}
    assert (await refused(lone)).param == f"messages[0].content[0].{field}"


@pytest.mark.spec("L2")
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (RESPONSES, {"input": [{"role": "user", "content": [picture(uri(drawn()))]}]}),
        (
            RESPONSES,
            {
                "input": [
                    {
                        "type": "function_call_output",
                        "output": [{"type": "input_image", "image_url": "http://a/b.png"}],
                    }
                ]
            },
        ),
        ("/v1/embeddings", {"input": "x", **body(picture("http://a/b.png"))}),
        ("/v1/completions", {"prompt": "x", **body(picture(uri(drawn())))}),
    ],
)
async def test_pictures_on_other_paths_are_400(path: str, fields: dict[str, Any]) -> None:
    param = (await refused({"model": "m"} | fields, path)).param
    assert param is not None and ("content[0]" in param or "output[0]" in param)


@pytest.mark.spec("L2")
async def test_declared_pixels_are_bounded_before_anything_is_decoded() -> None:
    error = await refused(body(picture(uri(declared(8_000, 8_000)))))
    assert "64,000,000 pixels" in str(error)
    huge = await refused(body(picture(uri(declared(1 << 20, 1 << 20)))))  # Pillow's own bound
    assert "image_url" in str(huge.param)
    few = declared(4_096, 4_096)
    await read(body(picture(uri(few)), picture(uri(few))))
    assert "in all" in str(await refused(body(*[picture(uri(few))] * 3)))


@pytest.mark.spec("L2")
async def test_number_of_pictures_is_bounded() -> None:
    small = picture(uri(drawn(size=(1, 1))))
    await read(body(*[small] * pictures.MAX_PICTURES))
    error = await refused(body(*[small] * (pictures.MAX_PICTURES + 1)))
    assert f"more than {pictures.MAX_PICTURES}" in str(error)
