"""The text of a configuration, from entries of the shipped ones, comments and all.

A shipped configuration is cut by its indentation, so that what `arbiter init` writes is what the
repository's own files have, and a person finds the same words there.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
CAPABILITIES = "          capabilities:\n"
ENTRY, MODELS, MODEL = " " * 12, " " * 14 + "models:", " " * 16
_KEY = re.compile(r"([\w./-]+):")


@dataclass(slots=True)
class CapabilityText:
    """One capability: the lines before its models, and those of each model."""

    head: str
    models: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return self.head + "".join(self.models.values())

    @property
    def engine(self) -> str:
        [row] = yaml.safe_load(self.head).values()
        return str(row["engine"])

    def add(self, name: str, comment: str, row: Mapping[str, Any]) -> None:
        text = yaml.safe_dump({name: dict(row)}, sort_keys=False, width=80, default_flow_style=None)
        first, *rest = text.splitlines(keepends=True)
        lines = [f"# {comment}\n", first, *rest]
        self.models[name] = "".join(MODEL + line for line in lines)


def shipped(file: str) -> dict[str, CapabilityText]:
    """The entries of a configuration beside this package, by name. Raises OSError."""
    text = (ROOT / file).read_text()
    return {name: _entry(part) for name, part in _parts(text.split(CAPABILITIES)[1], ENTRY)}


def _entry(text: str) -> CapabilityText:
    before, separator, after = text.partition(MODELS)
    line, _, rest = after.partition("\n")
    return CapabilityText(f"{before}{separator}{line}\n", dict(_parts(rest, MODEL)))


def _parts(text: str, indent: str) -> Iterable[tuple[str, str]]:
    """Yields each key of this indentation with its lines and the comments before it. Ends at the
    first line that is indented less."""
    name, lines, comments = "", "", ""
    for line in text.splitlines(keepends=True):
        if line.strip() and not line.startswith(indent):
            break
        rest = line.removeprefix(indent)
        if rest.startswith("#"):
            comments += line
        elif key := _KEY.match(rest):
            if name:
                yield name, lines
            name, lines, comments = key[1], comments + line, ""
        else:
            lines, comments = lines + comments + line, ""
    if name:
        yield name, lines + comments


def whole(
    about: list[str], port: int, arbiter: Mapping[str, str], entries: list[CapabilityText]
) -> str:
    """Returns the text of the file. `arbiter`: the values of its section by key; `about`: comments
    at the top."""
    comments = "".join(f"# {line}\n" for line in about)
    section = "".join(f"            {key}: {value}\n" for key, value in arbiter.items())
    return f"""{comments}proxy_location: HeadOnly
http_options:
  host: 127.0.0.1
  port: {port}

applications:
  - name: front
    route_prefix: /
    import_path: deployments.app:front
    deployments:
      - name: front
        # The whole system's table: a capability is one entry, and changing it restarts nothing.
        user_config:
          arbiter:
{section}{CAPABILITIES}{"".join(entry.text for entry in entries)}"""
