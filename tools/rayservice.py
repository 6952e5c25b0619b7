"""Write serve_config.yaml into `serveConfigV2` of deploy/rayservice.yaml.

In a pod the front listens on all addresses and is called by the name of its service. Text is
replaced and not parsed YAML, so that the comments of both files stay.
"""

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MANIFEST = ROOT / "deploy" / "rayservice.yaml"
HOSTS = ("serve-arbiter-serve-svc", "serve-arbiter-serve-svc.default.svc.cluster.local")
LISTENS, TABLE = "  host: 127.0.0.1\n", "        user_config:\n"
FRONT = f"{TABLE}          front:\n            hosts: [{', '.join(HOSTS)}]\n"
KEY = "  serveConfigV2: |\n"


def in_a_pod(config: str) -> str:
    """Raises ValueError when the text is not as serve_config.yaml has it."""
    for wanted in (LISTENS, TABLE):
        if config.count(wanted) != 1:
            raise ValueError(f"serve_config.yaml has not one line {wanted.strip()!r}")
    return config.replace(LISTENS, "  host: 0.0.0.0\n").replace(TABLE, FRONT)


def with_config(manifest: str, config: str) -> str:
    """The manifest with this `serveConfigV2`, which is the last key of its first document."""
    head, key, rest = manifest.partition(KEY)
    if not key:
        raise ValueError(f"{MANIFEST} has no line {KEY.strip()!r}")
    end = re.search(r"^---$", rest, re.M)
    indented = textwrap.indent(in_a_pod(config), "    ")
    return head + key + indented + (rest[end.start() :] if end else "")


def main() -> None:
    config = (ROOT / "serve_config.yaml").read_text()
    MANIFEST.write_text(with_config(MANIFEST.read_text(), config))


if __name__ == "__main__":
    main()
