"""By what a picture is known."""

import base64
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from deployments.engines.asgi import BadField
from deployments.engines.vllm.pictures import picture_identity
from tests.support.pictures import png


@pytest.mark.spec("H2", "L3")
def test_picture_that_no_decoder_is_made_for_is_refused_by_its_place(tmp_path: Path) -> None:
    """Pillow raises a TypeError for grey of 16 bits whose header says that it is interlaced."""
    llm: Any = SimpleNamespace(model_config=SimpleNamespace(model=str(tmp_path)))
    sees = picture_identity.Pictures(llm, has_cache=False)
    raw = bytearray(png(Image.new("I;16", (8, 8), 30_000)))
    uri = "data:image/png;base64,"
    assert sees.identity(uri + base64.b64encode(raw).decode(), b"tenant", "here")
    raw[28] = 1
    raw[29:33] = zlib.crc32(raw[12:29]).to_bytes(4, "big")
    with pytest.raises(BadField) as caught:
        sees.identity(uri + base64.b64encode(raw).decode(), b"tenant", "here")
    assert caught.value.param == "here"
