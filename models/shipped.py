"""Models whose weights the repository carries, in models/weights: unpacked by `make models`.

Each is a folder with `manifest.json`: the model's name, its files with their sha256, the recipe
that trained them, and what they reached. No byte is served that the manifest does not vouch for.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WEIGHTS = Path(__file__).with_name("weights")
MANIFEST = "manifest.json"


class Damaged(Exception):
    """A file has other bytes than its manifest says."""


def seal(folder: Path, model: str, facts: Mapping[str, Any]) -> None:
    """Writes the manifest of all files in `folder`."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    hashes = {str(p.relative_to(folder)): _sha256(p.read_bytes()) for p in files}
    text = json.dumps({"model": model, **facts, "files": hashes}, indent=2)
    (folder / MANIFEST).write_text(text + "\n")


def unpack(source: Path, models: Path) -> Path:
    """The model's folder in `models`, copied there unless it is there. A reader never sees half of
    it. Raises Damaged, OSError."""
    manifest = json.loads((source / MANIFEST).read_text())
    target = models / manifest["model"]
    if _is_there(target, manifest):
        return target
    models.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=models, prefix=".unpacking-") as scratch:
        made = Path(scratch, "model")
        for name, sha256 in manifest["files"].items():
            raw = (source / name).read_bytes()
            if _sha256(raw) != sha256:
                raise Damaged(f"{source / name}: sha256 {_sha256(raw)}, the manifest has {sha256}")
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            (made / name).write_bytes(raw)
        shutil.copyfile(source / MANIFEST, made / MANIFEST)
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)
    return target


def unpack_all(models: Path) -> list[Path]:
    """The folders in `models` of all that the repository carries. Raises Damaged, OSError."""
    return [unpack(file.parent, models) for file in sorted(WEIGHTS.glob(f"*/{MANIFEST}"))]


def _is_there(target: Path, manifest: Mapping[str, Any]) -> bool:
    try:
        if json.loads((target / MANIFEST).read_text()) != manifest:
            return False
        files = manifest["files"].items()
        return all(_sha256((target / name).read_bytes()) == sha256 for name, sha256 in files)
    except (OSError, ValueError):
        return False


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
