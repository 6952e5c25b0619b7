"""Opens pictures from strangers within a bound that no header tells.

Front and engines both open them: the front to refuse before a model is loaded, an engine because it
decodes.
"""

import io
import struct
import zlib

from PIL import Image, UnidentifiedImageError

# A progressive JPEG of few bytes may repeat its scans thousands of times, each as long to decode as
# the first; real files have about ten.
MAX_SCANS = 64
_SCAN = b"\xff\xda"
# What Pillow's decoders raise for broken files.
BROKEN = (
    *(OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, OverflowError),
    *(struct.error, zlib.error, Image.DecompressionBombError),
)
# A JPEG with more pictures behind the first, as cameras write it, has a name of its own in Pillow.
SEVERAL_IN_JPEG = "MPO"


def opened(raw: bytes, formats: tuple[str, ...]) -> Image.Image:
    """The picture by its header: no pixel is decoded yet. Only `formats` are tried. Raises BROKEN:
    a ValueError for too many scans and for a file of no such format."""
    try:
        image = Image.open(io.BytesIO(raw), formats=formats)
    except UnidentifiedImageError:  # its text has an address in this process
        raise ValueError("its first bytes are no header of one") from None
    # In other formats these bytes come by chance, in one place of 65,536.
    if image.format in ("JPEG", SEVERAL_IN_JPEG) and raw.count(_SCAN) > MAX_SCANS:
        raise ValueError(f"a JPEG of more than {MAX_SCANS} scans")
    return image
