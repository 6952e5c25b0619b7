"""`arbiter key add|list|remove`: the file of API keys, edited by its owner."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from arbiter.units import DEFAULT_TENANT
from deployments.cli.output import AsJson, CommandError, among, cell, say, show, table

app = typer.Typer(no_args_is_help=True, help="API keys of the front: make, list, remove.")

KeysFile = Annotated[
    Path | None,
    typer.Option("--keys", help="The file of keys. Default: keys.json beside the arbiter's state."),
]


def _scopes() -> list[str]:
    from deployments.front.access.keys import Scope

    return [scope.value for scope in Scope]


@contextmanager
def _troubles() -> Iterator[None]:
    """What is wrong with a key or the file, in words."""
    from deployments.front.access.keys import KeyTrouble

    try:
        yield
    except KeyTrouble as error:
        raise CommandError(str(error)) from error


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="The name of its owner, shown in the list.")],
    tenant: Annotated[str | None, typer.Option(help="Default: `default`.")] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            callback=among("scope", _scopes),
            autocompletion=_scopes,
            help="infer, view, priority, lease, admin or cloud; once for each. Default: infer.",
        ),
    ] = None,
    file: KeysFile = None,
    as_json: AsJson = False,
) -> None:
    """Make a key, shown once. From the first one on, every request needs a key."""
    from deployments.front.access import keys

    scopes = frozenset(keys.Scope(word) for word in scope or [keys.Scope.INFER])
    with _troubles():
        token = keys.add(file or keys.keys_path(), name, tenant or DEFAULT_TENANT, scopes)
    show(as_json, {"key": token}, token)
    if not as_json:
        say(f"{name} sends it as `Authorization: Bearer KEY`; it is not shown again", "dim")


@app.command("list")
def list_(file: KeysFile = None, as_json: AsJson = False) -> None:
    """Every key but for its secret."""
    from deployments.front.access import keys

    with _troubles():
        entries = [key for key in keys.load(file or keys.keys_path()).values() if not key.removed]
    rows: list[dict[str, Any]] = [
        {
            "id": key.id,
            "name": key.name,
            "tenant": key.tenant,
            "scopes": list(key.scopes),
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(key.created_unix_s)),
        }
        for key in entries
    ]
    heads = ("id", "name", "tenant", "scopes", "created")
    cells = [(r["id"], r["name"], r["tenant"], ",".join(r["scopes"]), r["created"]) for r in rows]
    show(as_json, rows, table(heads, cells))


@app.command()
def remove(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As `arbiter key list` has it.")],
    file: KeysFile = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a key; effective immediately."""
    from deployments.front.access import keys

    path = file or keys.keys_path()
    with _troubles():
        keys.remove(path, key_id)
        every = keys.load(path)
    tenant = every[key_id].tenant
    show(as_json, {"removed": key_id}, cell(f"removed {key_id}"))
    is_last = all(key.removed for key in every.values() if key.tenant == tenant)
    if is_last and not as_json:
        say(f"{tenant} has no key left; `arbiter forget {tenant}` erases what it left", "dim")
