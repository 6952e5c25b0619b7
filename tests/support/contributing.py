"""The snippets of CONTRIBUTING.md, as files of a package outside the repository."""

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
FILE = re.compile(r'"""(my_package/\w+\.py)')


def blocks(language: str) -> list[str]:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    return [text for kind, text in BLOCK.findall(page) if kind == language]


def package(folder: Path) -> Path:
    """Writes `my_package` below the folder, and its metadata as pip does; returns the folder."""
    for text in blocks("python"):
        if match := FILE.match(text):
            file = folder / match[1]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    (folder / "my_package" / "__init__.py").write_text("")
    [entry_point] = [text for text in blocks("toml") if "entry-points" in text]
    name, path = re.findall(r'^(\w+) = "(.+)"$', entry_point, re.M)[0]
    metadata = folder / "my_package-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[fsspec.specs]\n{name} = {path}\n")
    return folder


def addition() -> dict[str, Any]:
    """`capabilities` of the page, and `applications`, which it may have instead of the front."""
    config: dict[str, Any] = {}
    for text in blocks("yaml"):
        config |= yaml.safe_load(text)
    return config
