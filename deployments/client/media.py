"""Picture and Audio: what a person gives and gets instead of bytes."""

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

FileName = str | Path

# Of files of sound, for players; the engines look at the content.
SOUNDS = {
    ".aac": "audio/aac",
    ".flac": "audio/flac",
    ".m4a": "audio/mp4",
    ".mp3": "audio/mpeg",
    ".ogg": "audio/ogg",
    ".opus": "audio/ogg",
    ".wav": "audio/wav",
    ".webm": "audio/webm",
}


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture in a file's form: PNG, JPEG, WebP, GIF or BMP. Shows itself in a notebook."""

    data: bytes = field(repr=False)
    is_final: bool = True  # False: a preview of a picture that is still being drawn

    @classmethod
    def open(cls, path: FileName) -> "Picture":
        """Raises OSError."""
        return cls(Path(path).read_bytes())

    @classmethod
    def of(cls, image: Image.Image, form: str = "PNG") -> "Picture":
        """Makes a picture of pillow's image."""
        file = io.BytesIO()
        image.save(file, form)
        return cls(file.getvalue())

    def save(self, path: FileName) -> Path:
        """Writes the data in the format that it has, whatever the name ends with. Raises
        OSError."""
        file = Path(path)
        file.write_bytes(self.data)
        return file

    @property
    def image(self) -> Image.Image:
        """The picture as pillow's image. Raises PIL.UnidentifiedImageError."""
        return Image.open(io.BytesIO(self.data))

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return self.image.size

    @property
    def content_type(self) -> str:
        """The MIME type, as `image/png`."""
        return Image.MIME[self.image.format or "PNG"]

    @property
    def uri(self) -> str:
        """The picture as a `data:` URL, as it stands in a message."""
        return f"data:{self.content_type};base64,{base64.b64encode(self.data).decode()}"

    def _repr_mimebundle_(self, **_: Any) -> Mapping[str, str]:
        return {self.content_type: base64.b64encode(self.data).decode()}


@dataclass(frozen=True, slots=True)
class Audio:
    """Sound in a file's form, or a piece of a stream of it. Plays itself in a notebook."""

    data: bytes = field(repr=False)
    content_type: str = "audio/wav"

    @classmethod
    def open(cls, path: FileName) -> "Audio":
        """Reads a file, whose type its suffix tells. Raises OSError."""
        file = Path(path)
        kind = SOUNDS.get(file.suffix.lower(), "application/octet-stream")
        return cls(file.read_bytes(), kind)

    def save(self, path: FileName) -> Path:
        """Writes the data in the format that it has, whatever the name ends with. Raises
        OSError."""
        file = Path(path)
        file.write_bytes(self.data)
        return file

    def _repr_html_(self) -> str:
        source = f"data:{self.content_type};base64,{base64.b64encode(self.data).decode()}"
        return f'<audio controls src="{source}"></audio>'


PictureLike = Picture | FileName
AudioLike = Audio | FileName


def picture_of(source: PictureLike) -> Picture:
    """Raises OSError."""
    return source if isinstance(source, Picture) else Picture.open(source)


def audio_of(source: AudioLike) -> Audio:
    """Raises OSError."""
    return source if isinstance(source, Audio) else Audio.open(source)
