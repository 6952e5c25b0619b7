"""Start the system in a container or under systemd: make the models, check the file, `serve run`.

    python deploy/start.py [--host ADDRESS] FILE

A container must listen on all of its addresses, so `--host` replaces the one in the file. `serve
run` takes the place of this process, so that signals reach it.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

BIN = Path(sys.executable).parent


def listening_on(config: dict[str, Any], host: str | None) -> dict[str, Any]:
    """Returns the configuration with another address to listen on; without `host` as it is."""
    if host is None:
        return config
    return config | {"http_options": (config.get("http_options") or {}) | {"host": host}}


def written(config: dict[str, Any], folder: Path) -> Path:
    """The file that `serve run` is given."""
    path = folder / "serve_config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--host", help="the address to listen on; default: the file's")
    return parser.parse_args(words)


def main() -> None:
    args = arguments(sys.argv[1:])
    config = listening_on(yaml.safe_load(args.file.read_text()), args.host)
    file = str(written(config, Path(tempfile.mkdtemp(prefix="serve-arbiter-"))))
    subprocess.run([sys.executable, "-m", "models.make_models"], check=True)
    subprocess.run([BIN / "arbiter", "check", file], check=True)
    os.execv(BIN / "serve", ["serve", "run", file])


if __name__ == "__main__":
    main()
