"""`arbiter key add|list|remove`: the file of API keys, by hand of its owner."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from deployments.front import keys


def add_parser(commands: Any, *parents: argparse.ArgumentParser) -> None:
    about = "API keys of the front: make, list, remove."
    acts = commands.add_parser("key", help=about, description=about).add_subparsers(
        dest="act", required=True
    )
    file = argparse.ArgumentParser(add_help=False)
    file.add_argument(
        "--keys", type=Path, default=keys.keys_path(), help="the file (default: %(default)s)"
    )

    def act(name: str, run: Any, about: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = acts.add_parser(
            name, help=about, description=about, parents=[*parents, file]
        )
        made.set_defaults(run=run)
        return made

    adding = act("add", add, "Make a key; it is shown once. With the first, all need one.")
    adding.add_argument("name", help="whose it is, for the list")
    adding.add_argument("--tenant", default=keys.DEFAULT_TENANT)
    adding.add_argument(
        "--scope",
        type=keys.Scope,
        choices=list(keys.Scope),
        action="append",
        help="once for each (default: infer)",
    )
    act("list", show, "Every key but for its secret.")
    act("remove", remove, "Good no longer, from the next request on.").add_argument("id")


def add(args: argparse.Namespace) -> None:
    scopes = frozenset(args.scope or [keys.Scope.INFER])
    token = keys.add(args.keys, args.name, args.tenant, scopes)
    print(json.dumps({"key": token}) if args.json else token)


def show(args: argparse.Namespace) -> None:
    found = [key for key in keys.load(args.keys).values() if not key.removed]
    rows = [
        {
            "id": key.id,
            "name": key.name,
            "tenant": key.tenant,
            "scopes": list(key.scopes),
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(key.created_unix_s)),
        }
        for key in found
    ]
    if args.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print("  ".join(",".join(v) if isinstance(v, list) else str(v) for v in row.values()))


def remove(args: argparse.Namespace) -> None:
    keys.remove(args.keys, args.id)
    print(json.dumps({"removed": args.id}) if args.json else f"removed {args.id}")
