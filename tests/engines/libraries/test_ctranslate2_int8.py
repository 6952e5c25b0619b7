"""Whisper's weights in int8: each within half a step of the package's, and nothing else changed."""

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from models import packaged
from models.ctranslate2_int8 import OtherFormat, convert_whisper, read

pytestmark = pytest.mark.spec("H3", "M1")

SOURCE = packaged.folder_of(packaged.WHISPER.package) / "model"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packaged.make_asr(tmp_path_factory.mktemp("models"))


def test_each_weight_is_within_half_a_step_and_all_else_is_as_it_was(made: Path) -> None:
    before, aliases = read(SOURCE / "model.bin")
    after, same = read(made / "model.bin")
    scales = {name for name in after if name.endswith("_scale")}
    assert same == aliases, "of which CTranslate2 takes the scales too"
    new = after.keys() - scales - before.keys()
    assert {after[name].ndim for name in new} <= {0}, "no more than flags of a later version"
    assert len(scales) == sum(value.dtype == np.int8 and value.ndim > 1 for value in after.values())
    for name, value in before.items():
        if f"{name}_scale" not in scales:
            assert np.array_equal(after[name], value), name
            continue
        rows = value.reshape(len(value), -1).astype(np.float32)
        scale = after[f"{name}_scale"][:, None]
        assert np.abs(after[name].reshape(rows.shape) / scale - rows).max() <= 0.51 / scale.min()
    assert sum(after[name.removesuffix("_scale")].size for name in scales) > 36_900_000


def test_int8_copy_is_made_once_and_has_the_files_beside_the_weights(made: Path) -> None:
    written = (made / "model.bin").stat()
    assert packaged.make_asr(made.parent) == made
    assert (made / "model.bin").stat() == written
    for name in ("config.json", "tokenizer.json", "vocabulary.txt"):
        assert (made / name).read_bytes() == (SOURCE / name).read_bytes()


def test_file_that_is_cut_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    raw = (SOURCE / "model.bin").read_bytes()
    file = tmp_path / "model.bin"
    named = raw.index(b"WhisperSpec")
    for damaged, why in (
        (raw[:1_000_000], "broken at byte"),
        (raw[:5], "broken at byte"),
        (raw + b"more", "4 bytes follow its end"),
        (struct.pack("<I", 5) + raw[4:], "of version 5; need 'WhisperSpec' of version 6"),
        (raw[:named] + b"MarianSpecs" + raw[named + 11 :], "'MarianSpecs' of version 6"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(OtherFormat, match=why):
            read(file)


def test_weights_that_are_none_of_whispers_are_named(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(SOURCE, source)
    raw = (source / "model.bin").read_bytes()
    (source / "model.bin").write_bytes(raw.replace(b"encoder/conv1/bias", b"encoder/conv1/bios"))
    with pytest.raises(OtherFormat, match="1 weights are none of Whisper's: encoder/conv1/bios"):
        convert_whisper(source, tmp_path)
