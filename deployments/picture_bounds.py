"""Opens pictures from strangers within a bound that no header tells.

Front and engines both open them: the front to refuse before a model is loaded, an engine because it
decodes.
"""

import io

from PIL import Image

# A progressive JPEG of few bytes may repeat its scans thousands of times, each as long to decode as
# the first; real files have about ten.
MAX_SCANS = 64
_SCAN = b"\xff\xda"
# A JPEG with more pictures behind the first, as cameras write it, has a name of its own in Pillow.
SEVERAL_IN_JPEG = "MPO"


def opened(raw: bytes, formats: tuple[str, ...]) -> Image.Image:
    """The picture by its header: no pixel is decoded yet. Only `formats` are tried. Raises
    ValueError for too many scans, and what Pillow raises for a file that is none."""
    image = Image.open(io.BytesIO(raw), formats=formats)
    # In other formats these bytes come by chance, in one place of 65,536.
    if image.format in ("JPEG", SEVERAL_IN_JPEG) and raw.count(_SCAN) > MAX_SCANS:
        raise ValueError(f"a JPEG of more than {MAX_SCANS} scans")
    return image
