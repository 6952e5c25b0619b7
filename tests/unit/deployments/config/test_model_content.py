"""By what the content of a model is known."""

import os
from pathlib import Path

import pytest

from arbiter.units import MIB
from deployments.config.model_content import PIECE_BYTES, content_of, pieces

SIZE_BYTES = 20 * MIB  # read by pieces
PLACES = {"begin": 0, "middle": pieces(SIZE_BYTES)[32][0], "end": SIZE_BYTES - 1}


@pytest.mark.spec("H8", "D5")
@pytest.mark.parametrize("change", [*PLACES, "size", "name", "small"])
def test_content_of_a_model_changes_with_its_files_and_not_with_their_times(
    tmp_path: Path, change: str
) -> None:
    large, small = tmp_path / "model.safetensors", tmp_path / "config.json"
    with large.open("wb") as stream:
        stream.truncate(SIZE_BYTES)
    small.write_text("{}")
    before = content_of(str(tmp_path))
    os.utime(large, (1, 1))
    assert content_of(str(tmp_path)) == before
    if change in PLACES or change == "size":
        with large.open("r+b") as stream:
            stream.seek(PLACES.get(change, SIZE_BYTES))
            stream.write(b"x")
    elif change == "name":
        large.rename(tmp_path / "other.safetensors")
    else:
        small.write_text('{"a": 1}')
    assert content_of(str(tmp_path)) != before


@pytest.mark.spec("D5")
def test_pieces_of_a_large_file_begin_with_it_and_end_with_it() -> None:
    read = pieces(SIZE_BYTES)
    assert (read[0][0], read[-1]) == (0, (SIZE_BYTES - PIECE_BYTES, PIECE_BYTES))


@pytest.mark.spec("H8")
def test_content_of_a_hub_id_is_its_name_and_of_a_file_its_bytes(tmp_path: Path) -> None:
    assert content_of("org/no-such-folder") == "org/no-such-folder"
    one, other = tmp_path / "one.gguf", tmp_path / "other.gguf"
    for file in (one, other):
        file.write_bytes(file.name.encode())
    assert len({str(one), content_of(str(one)), content_of(str(other))}) == 3
