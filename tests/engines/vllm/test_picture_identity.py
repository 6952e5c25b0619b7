"""By what a picture is known."""

import base64
import os
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from deployments.engines.asgi import BadField
from deployments.engines.vllm.pictures import picture_identity
from tests.support.pictures import png


@pytest.mark.spec("H8")
@pytest.mark.parametrize("change", ["begin", "middle", "end", "size", "name", "small"])
def test_content_of_a_model_changes_with_its_files_and_not_with_their_times(
    tmp_path: Path, change: str
) -> None:
    large, small = tmp_path / "model.safetensors", tmp_path / "config.json"
    large.write_bytes(bytes(5 << 20))
    small.write_text("{}")
    before = picture_identity.content_hash(tmp_path)
    os.utime(large, (1, 1))
    assert picture_identity.content_hash(tmp_path) == before
    places = {"begin": 0, "middle": 32 * ((5 << 20) - (64 << 10)) // 63, "end": (5 << 20) - 1}
    if change in places or change == "size":
        with large.open("r+b") as stream:
            stream.seek(places.get(change, 5 << 20))
            stream.write(b"x")
    elif change == "name":
        large.rename(tmp_path / "other.safetensors")
    else:
        small.write_text('{"a": 1}')
    assert picture_identity.content_hash(tmp_path) != before


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
