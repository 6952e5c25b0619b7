"""Uploads from strangers: sound stills of known formats are opened, all else is refused."""

import io
import random
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from deployments.engines.asgi import BadField
from deployments.engines.diffusers import picture_files
from deployments.engines.diffusers.picture_files import (
    EncodingFailed,
    encode,
    mask_of,
    open_upload,
)
from deployments.requests.picture_bounds import MAX_SCANS
from models.shapes import Fact, draw
from tests.support.examples import examples
from tests.support.pictures import difference, png

STILL = draw(Fact("red", "circle", "blue"))
FILES = {
    "png": png(STILL),
    "jpeg": png(STILL, "JPEG", quality=95),
    "webp": png(STILL, "WEBP", lossless=True),
    "progressive": png(STILL, "JPEG", progressive=True),
}
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'


def refused(raw: bytes, most_pixels: int = picture_files.MAX_PIXELS) -> str:
    with pytest.raises(BadField) as caught:
        open_upload(raw, "image", most_pixels)
    assert caught.value.param == "image" and "`image`" in str(caught.value)
    return str(caught.value)


@pytest.mark.spec("L2")
@pytest.mark.parametrize("kind", FILES)
def test_sound_stills_are_opened(kind: str) -> None:
    opened = open_upload(FILES[kind], "image")
    assert (opened.mode, opened.size) == ("RGB", (64, 64))
    assert difference(opened.resize((8, 8)), STILL.resize((8, 8))) < 30


@pytest.mark.spec("L2")
@pytest.mark.parametrize("kind", ["GIF", "TIFF", "BMP", "PPM", "ICO"])
def test_other_formats_are_refused(kind: str) -> None:
    refused(png(STILL, kind))


@pytest.mark.spec("L2")
@pytest.mark.parametrize(
    "raw", [b"", b"x", SVG, b"<?xml?>" + SVG, b"%PDF-1.4", b"\x80\x04pickle.", b"RIFF\0\0\0\0WEBP"]
)
def test_files_that_are_no_pictures_are_refused(raw: bytes) -> None:
    assert "object at 0x" not in refused(raw)


def huge_png(side: int) -> bytes:
    """A valid file of a few bytes whose header promises side x side pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + data + chunk(b"IEND", b"")


@pytest.mark.spec("L2")
@pytest.mark.parametrize("side", [4_097, 50_000, 2**31 - 1])
def test_a_header_of_too_many_pixels_is_refused_before_they_are_decoded(side: int) -> None:
    refused(huge_png(side))


@pytest.mark.spec("L2")
def test_the_bound_of_pixels_is_exact() -> None:
    assert open_upload(FILES["png"], "image", 64 * 64).size == (64, 64)
    assert "64x64 pixels; at most 4095" in refused(FILES["png"], 64 * 64 - 1)


@pytest.mark.spec("L2")
@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_moving_pictures_are_refused(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), (shade, 0, 0)) for shade in range(0, 250, 50)]
    raw = png(frames[0], kind, save_all=True, append_images=frames[1:])
    assert "5 frames" in refused(raw)


@pytest.mark.spec("L2")
def test_a_jpeg_that_repeats_its_scans_is_refused() -> None:
    raw = FILES["progressive"]
    scan = raw.index(b"\xff\xda")
    assert "scans" in refused(raw[:-2] + raw[scan:-2] * MAX_SCANS + raw[-2:])


def photograph(**more: object) -> bytes:
    """A JPEG with a second picture behind the first, as phones write them."""
    return png(STILL, "MPO", save_all=True, append_images=[Image.new("RGB", (8, 8))], **more)


def test_a_photograph_with_a_second_picture_behind_it_is_a_still() -> None:
    opened = open_upload(photograph(quality=95), "image")
    assert opened.size == STILL.size
    assert difference(opened.resize((8, 8)), STILL.resize((8, 8))) < 30


@pytest.mark.spec("L2")
def test_a_photograph_that_repeats_its_scans_is_refused() -> None:
    raw = photograph(progressive=True)
    begin, end = raw.index(b"\xff\xda"), raw.index(b"\xff\xd9")
    assert "scans" in refused(raw[:end] + raw[begin:end] * MAX_SCANS + raw[end:])


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_bytes_of_a_scan_in_another_format_are_chance(kind: str) -> None:
    dice = np.random.default_rng(1)
    noise = Image.fromarray(dice.integers(0, 255, (1500, 1500, 3), dtype=np.uint8))
    raw = png(noise, kind, **({"lossless": True, "method": 0} if kind == "WEBP" else {}))
    assert raw.count(b"\xff\xda") > MAX_SCANS
    assert open_upload(raw, "image").size == (1500, 1500)


@pytest.mark.spec("L2")
def test_text_that_unpacks_to_much_is_refused() -> None:
    target = io.BytesIO(FILES["png"])
    body = b"iTXtkey\0\1\0\0\0" + zlib.compress(b"a" * (80 << 20))
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    refused(target.getvalue()[:33] + chunk + target.getvalue()[33:])


@pytest.mark.spec("L3")
@settings(max_examples=examples(150))
@given(st.sampled_from(sorted(FILES)), st.integers(0, 2**32), st.integers(0, 3))
def test_damaged_files_are_opened_or_refused_by_field(kind: str, seed: int, how: int) -> None:
    """Truncated, with bytes changed, with a part doubled, with another's magic."""
    dice, raw = random.Random(seed), bytearray(FILES[kind])
    at = dice.randrange(len(raw))
    if how == 0:
        del raw[at:]
    elif how == 1:
        for _ in range(dice.randrange(1, 40)):
            raw[dice.randrange(len(raw))] = dice.randrange(256)
    elif how == 2:
        raw[at:at] = raw[dice.randrange(len(raw)) :]
    else:
        raw[:12] = FILES[dice.choice(sorted(FILES))][:12]
    try:
        assert open_upload(bytes(raw), "image").mode in ("RGB", "RGBA")
    except BadField as bad:
        assert bad.param == "image"


def test_a_picture_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: turn a quarter clockwise
    upright = open_upload(png(Image.new("RGB", (30, 20), "red"), "JPEG", exif=exif), "image")
    assert upright.size == (20, 30)


def test_grey_of_sixteen_bits_keeps_its_shades() -> None:
    shades = np.arange(256, dtype=np.uint16).reshape(16, 16)
    opened = open_upload(png(Image.fromarray(shades * 257)), "image")
    assert opened.mode == "RGB"
    assert list(opened.getchannel("G").tobytes()) == list(range(256))


def test_shade_of_sixteen_bits_that_a_file_calls_transparent_is() -> None:
    """Alone: others that are reduced to the same are seen."""
    shades = np.arange(5_000, 5_004, dtype=np.uint16).reshape(2, 2)
    opened = open_upload(png(Image.fromarray(shades), transparency=5_001), "image")
    assert opened.mode == "RGBA"
    assert list(opened.getchannel("A").tobytes()) == [255, 0, 255, 255]


def test_what_is_transparent_is_painted_anew() -> None:
    mask = Image.new("RGBA", (2, 1), (255, 255, 255, 255))
    mask.putpixel((0, 0), (0, 0, 0, 0))
    assert list(mask_of(open_upload(png(mask), "mask")).tobytes()) == [255, 0]


def test_without_transparency_the_white_part_of_a_mask_is_painted_anew() -> None:
    mask = Image.new("L", (2, 1), 0)
    mask.putpixel((1, 0), 255)
    assert list(mask_of(open_upload(png(mask), "mask")).tobytes()) == [0, 255]


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_an_answer_decodes_to_the_picture(kind: str) -> None:
    raw = encode(STILL, kind, None)  # type: ignore[arg-type]
    again = Image.open(io.BytesIO(raw))
    assert again.format == kind.upper()
    assert difference(again.resize((8, 8)), STILL.resize((8, 8))) < 10


@pytest.mark.spec("J1")
@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_an_answer_that_its_format_cannot_hold_is_a_typed_error(kind: str) -> None:
    wide = picture_files.MAX_SIDES[kind] + 1  # type: ignore[index]
    with pytest.raises(EncodingFailed, match=f"could not be written as {kind}"):
        encode(Image.new("RGB", (wide, 1)), kind, None)  # type: ignore[arg-type]
    assert encode(Image.new("RGB", (wide - 1, 1)), kind, None)  # type: ignore[arg-type]


def test_compression_makes_an_answer_smaller() -> None:
    assert len(encode(STILL, "jpeg", 20)) < len(encode(STILL, "jpeg", 95))
