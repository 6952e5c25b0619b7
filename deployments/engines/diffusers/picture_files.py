"""Pictures as files: uploads from strangers, opened within bounds, and answers, encoded.

Only the formats of FORMATS are tried, by their own decoders: neither SVG, which can name other
files, nor any other format that pillow knows is ever opened. Bounds are checked against the header,
before one pixel is decoded.
"""

import io

import numpy as np
from PIL import Image, ImageOps

from arbiter.errors import RequestError
from deployments.engines.asgi import BadField
from deployments.requests.image_fields import Format
from deployments.requests.picture_bounds import BROKEN, SEVERAL_IN_JPEG, opened

FORMATS = ("PNG", "JPEG", "WEBP")
# Of an answer, in pixels: what libwebp and libjpeg write (WEBP_MAX_DIMENSION, JPEG_MAX_DIMENSION).
# A PNG may have more than any request asks for.
MAX_SIDES: dict[Format, int] = {"webp": 16_383, "jpeg": 65_500}
MAX_PIXELS = 4096 * 4096  # of an upload: 48 MiB decoded, before it is reduced to the model's size


class EncodingFailed(RequestError):
    """The library raised an error while it wrote a picture's file."""

    status_code, code = 500, "encoding_failed"

    def __init__(self, file_format: str, cause: str) -> None:
        super().__init__(file_format, cause)
        self.file_format, self.cause = file_format, cause

    def __str__(self) -> str:
        return (
            f"the picture could not be written as {self.file_format}: {self.cause};"
            " ask for another `output_format`"
        )


def open_upload(raw: bytes, field: str, most_pixels: int = MAX_PIXELS) -> Image.Image:
    """The decoded picture, upright, with its transparency if it has any (RGB or RGBA). Raises
    BadField, which names `field`."""
    try:
        _check_header(raw, field, most_pixels)
        with opened(raw, FORMATS) as image:
            ImageOps.exif_transpose(image, in_place=True)  # copies no picture that is upright
            if image.mode.startswith("I"):  # 16 bits of grey, which Pillow would cut to 255
                return _reduced_grey(image)
            mode = "RGBA" if image.has_transparency_data else "RGB"
            return image if image.mode == mode else image.convert(mode)
    except BROKEN as error:
        formats = ", ".join(FORMATS)
        raise BadField(field, f"`{field}` is no sound {formats} file: {error}") from error


def _reduced_grey(image: Image.Image) -> Image.Image:
    """16 bits of grey as 8 bits of each colour; the shade that the file calls transparent is."""
    transparent = image.info.pop("transparency", None)
    reduced = image.point(lambda value: value / 256).convert("L").convert("RGB")
    if transparent is not None:
        reduced.putalpha(Image.fromarray(np.asarray(image) != transparent).convert("L"))
    return reduced


def _check_header(raw: bytes, field: str, most_pixels: int) -> None:
    """Raises BadField; what pillow raises for a file that is not what it says."""
    with opened(raw, FORMATS) as image:
        if image.width * image.height > most_pixels:
            text = f"{image.width}x{image.height} pixels; at most {most_pixels} in all"
            raise BadField(field, f"`{field}`: {text}")
        frames = getattr(image, "n_frames", 1)
        # A phone's photograph may have its depth or its gain of brightness as a second picture.
        if frames > 1 and image.format != SEVERAL_IN_JPEG:
            raise BadField(field, f"`{field}`: {frames} frames; send a still picture")
        image.verify()


def mask_of(upload: Image.Image) -> Image.Image:
    """What to paint anew, white on black (L): the transparent part, as OpenAI has it, or the white
    part of a mask without transparency, as diffusers has it."""
    if upload.mode == "RGBA":
        return ImageOps.invert(upload.getchannel("A"))
    return upload.convert("L")


def encode(image: Image.Image, file_format: Format, quality: int | None) -> bytes:
    """`quality`: 0 to 100, of jpeg and webp; None: 100, as OpenAI has it. Raises EncodingFailed."""
    target = io.BytesIO()
    how = {} if file_format == "png" else {"quality": 100 if quality is None else quality}
    try:
        image.save(target, format=file_format, **how)
    except (OSError, ValueError, SystemError) as error:
        raise EncodingFailed(file_format, f"{type(error).__name__}: {error}") from error
    return target.getvalue()
