"""By what a picture is known."""

import os
from pathlib import Path

import pytest

from deployments.engines.vllm.pictures import picture_identity


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
