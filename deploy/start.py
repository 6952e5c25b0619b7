"""Start the system in a container or under systemd: make the models, check the file, `serve run`.

    python deploy/start.py [--host ADDRESS] FILE

A container must listen on all of its addresses, so `--host` replaces the address in the file, in a
copy beside the state, of which the next start makes a new one. The copy is named by address and
port, so that systems beside each other have one each. `serve run` takes the place of this process,
so that signals reach it.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import yaml

from arbiter.server.state_path import default_path

BIN = Path(sys.executable).parent


def listening_on(file: Path, host: str | None) -> Path:
    """The file that `serve run` is given: itself, or with `host` a copy with that address."""
    if host is None:
        return file
    config = yaml.safe_load(file.read_text())
    config["http_options"] = http = (config.get("http_options") or {}) | {"host": host}
    port = http.get("port", 8000)  # Serve's default
    copy = default_path().with_name(f"serve_config.{host}.{port}.yaml")
    copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    copy.write_text(yaml.safe_dump(config, sort_keys=False))
    return copy


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--host", help="the address to listen on; default: the file's")
    return parser.parse_args(words)


def main() -> None:
    args = arguments(sys.argv[1:])
    file = str(listening_on(args.file, args.host))
    subprocess.run([sys.executable, "-m", "models.make_models"], check=True)
    subprocess.run([BIN / "arbiter", "check", file], check=True)
    os.execv(BIN / "serve", ["serve", "run", file])


if __name__ == "__main__":
    main()
