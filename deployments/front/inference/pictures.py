"""Pictures in messages: which parts may pass to an engine, checked before a model is loaded.

Engines take more than the front lets through. vLLM fetches any http(s) URL by itself, takes
embeddings in place of a picture, and trusts a part's `uuid` as the identity of its pixels: with the
uuid of another picture it describes that other picture. So only `data:` URIs of bitmaps pass, each
without its uuid; the engine sets one of its own. A picture's size is read from its header here, and
its pixels are decoded in the engine.
"""

import base64
import binascii
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

# What a picture may be: bitmaps that Pillow decodes by itself. Never SVG, whose text names other
# files, nor EPS and WMF, for which Pillow runs other programs.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PICTURES = 32  # in one request; a model has its own, lower bound (`limit_mm_per_prompt`)
# Of all pictures of a request: a picture of one colour with 32 M pixels is a PNG of 100 KB, and
# 100 MB once it is decoded. Four photographs of 8 M pixels pass.
MAX_PIXELS = 32 << 20

PICTURE = "image_url"
PICTURES_AT = frozenset({"/v1/chat/completions"})
# Anthropic's form, which vLLM's own handler turns into the one above
BLOCK, SOURCE = "image", "source"
BLOCKS_AT = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
# Types of parts, and keys by which vLLM knows a part without a type.
OTHER_MEDIA = frozenset(
    "audio_embeds audio_url file image image_embeds image_pil input_audio input_file input_image "
    "input_video prompt_embeds source video video_embeds video_url".split()
)
NESTED = 3  # levels of parts; engines read two
_DATA = re.compile(r"data:image/(png|jpe?g|webp|gif|bmp|x-ms-bmp);base64,", re.IGNORECASE)


class BadPart(ValueError):
    """A part of a message that the front refuses. `place`: as `messages[0].content[1]`."""

    def __init__(self, place: str, why: str) -> None:
        super().__init__(place, why)
        self.place, self.why = place, why

    def __str__(self) -> str:
        return f"`{self.place}`: {self.why}"


@dataclass(slots=True)
class PictureCheck:
    """One request's parts, one after the other."""

    path: str
    pictures: int = 0
    pixels: int = 0
    changed: list[str] = field(default_factory=list)  # places where a uuid was dropped

    def run(self, fields: dict[str, Any]) -> bool:
        """Checks all parts of all messages and drops their uuids; returns whether it dropped one.
        Raises BadPart."""
        for name in ("messages", "input"):
            for place, part in _parts(fields.get(name), name):
                self._check(place, part)
        return bool(self.changed)

    def _check(self, place: str, part: dict[str, Any]) -> None:
        if "uuid" in part:
            del part["uuid"]
            self.changed.append(place)
        kinds = ({str(part.get("type"))} | part.keys()) & (OTHER_MEDIA | {PICTURE})
        if not kinds:
            return
        if self.path in BLOCKS_AT:
            return self._check_block(place, part, kinds)
        if other := sorted(kinds - {PICTURE}):
            raise BadPart(f"{place}.{other[0]}", "is not taken; a picture is an `image_url`")
        if self.path not in PICTURES_AT:
            raise BadPart(place, f"pictures are taken at {', '.join(sorted(PICTURES_AT))}")
        self._check_picture(f"{place}.{PICTURE}", part)

    def _check_block(self, place: str, part: dict[str, Any], kinds: set[str]) -> None:
        if part.get("type") != BLOCK or (kinds := kinds - {BLOCK, SOURCE}):
            name = min(kinds)
            raise BadPart(f"{place}.{name}", "is not taken; a picture is a block of type `image`")
        place, source = f"{place}.{SOURCE}", part.get(SOURCE)
        if not isinstance(source, dict) or source.get("type") != "base64":
            raise BadPart(place, "give the picture itself, as a source of type `base64`")
        if unknown := sorted(source.keys() - {"type", "media_type", "data"}):
            raise BadPart(f"{place}.{unknown[0]}", "is not taken")
        self._check_uri(place, f"data:{source.get('media_type')};base64,{source.get('data')}")

    def _check_picture(self, place: str, part: dict[str, Any]) -> None:
        url = part.get(PICTURE)
        self._check_uri(place, url.get("url") if isinstance(url, dict) else url)

    def _check_uri(self, place: str, url: object) -> None:
        self.pictures += 1
        if self.pictures > MAX_PICTURES:
            raise BadPart(place, f"more than {MAX_PICTURES} pictures")
        if not isinstance(url, str) or not (match := _DATA.match(url)):
            expected = "`data:image/png;base64,...`, or jpeg, webp, gif, bmp"
            raise BadPart(place, f"give the picture itself, as {expected}")
        try:
            data = base64.b64decode(url[match.end() :].encode(), validate=True)
        except (binascii.Error, UnicodeEncodeError) as error:
            raise BadPart(place, f"is not base64: {error}") from error
        width, height = size_of(data, place)
        self.pixels += width * height
        if self.pixels > MAX_PIXELS:
            raise BadPart(place, f"{self.pixels:,} pixels in all; at most {MAX_PIXELS:,}")


def _parts(messages: object, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each part that is an object, with its place: `messages[0].content[1]`."""
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):
            continue
        yield from _parts_of(message, f"{name}[{number}]", NESTED - 1)


def _parts_of(
    owner: dict[str, Any], place: str, depth: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Parts may have parts: the result of a tool, in Anthropic's form and in that of Responses.
    Raises BadPart."""
    for name in ("content", "output"):
        parts = owner.get(name)
        for index, part in enumerate(parts if isinstance(parts, list) else [parts]):
            if isinstance(part, dict):
                place_of_part = f"{place}.{name}[{index}]"
                if depth < 0:
                    raise BadPart(
                        place_of_part, f"parts of parts of parts, more than {NESTED} deep"
                    )
                yield place_of_part, part
                yield from _parts_of(part, place_of_part, depth - 1)


def size_of(data: bytes, place: str) -> tuple[int, int]:
    """Width and height by the header alone: nothing is decoded. Raises BadPart."""
    from deployments.requests.picture_bounds import BROKEN, opened

    try:
        with opened(data, FORMATS) as picture:
            size, mode = picture.size, picture.mode
    except BROKEN as error:
        formats = ", ".join(FORMATS)
        raise BadPart(place, f"is no picture in one of {formats}: {error}") from error
    if mode.startswith("I"):  # engines would read every shade above 255 as white
        raise BadPart(place, "has 16 bits of grey; write it with 8")
    return size
