"""Commands that steer a running system by hand: models, floors, settings, leases' ends."""

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal
from urllib.parse import quote

import typer

from arbiter.units import Bytes, human
from deployments.cli.http import Url, check_json, front
from deployments.cli.output import AsJson, CommandError, cell, show

Model = Annotated[str, typer.Argument(help="A model's name, from `arbiter residency`.")]


def load(model: Model, as_json: AsJson = False, url: Url = None) -> None:
    """Load a model now; keep-warm and eviction are as after a request."""
    _by_hand("load", model, as_json, url)


def unload(model: Model, as_json: AsJson = False, url: Url = None) -> None:
    """Unload a model: at once if it is idle, after its load if it loads. In use it stays."""
    _by_hand("unload", model, as_json, url)


def grow(model: Model, as_json: AsJson = False, url: Url = None) -> None:
    """Give a resident model what its `grow_to` says."""
    _by_hand("grow", model, as_json, url)


def shrink(model: Model, as_json: AsJson = False, url: Url = None) -> None:
    """Take back what a model grew by."""
    _by_hand("shrink", model, as_json, url)


def _by_hand(act: str, model: str, as_json: bool, url: str | None) -> None:
    with front(url) as f:
        reply = f.send("POST", f"/arbiter/models/{act}/{quote(model)}")
    show(as_json, reply, cell(ASKED[act](reply)))


ASKED: dict[str, Callable[[dict[str, Any]], str]] = {
    "load": lambda done: f"{done['model']} is asked for; `arbiter residency` shows it come",
    "unload": lambda done: (
        f"{done['model']} leaves unless it is in use: {', '.join(done['tickets'])}"
        if done["tickets"]
        else f"{done['model']} is not loaded"
    ),
    "grow": lambda done: f"{done['model']} is told to grow; `arbiter events` tells what came of it",
    "shrink": lambda done: f"{done['model']} is told to give back what it grew by",
}


def compact(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help="Default: all that hold more than they need."),
    ] = None,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Free idle models and load them again, so that memory their engines keep comes back."""
    with front(url) as f:
        reply = f.send("POST", "/arbiter/compact", {"models": models or []})
    freed = human(Bytes(reply["freed_bytes"]))
    later = "" if reply["is_finished"] else "; it goes on, and `arbiter events` tells of it"
    lines = [f"{reply['count']} compacted, {freed} that they did not need{later}"]
    lines += [f"{row['model']} stays as it is: {row['why']}" for row in reply["spared"]]
    show(as_json, reply, *map(cell, lines))


def drop_copy(
    copy: Annotated[str, typer.Argument(help="The key of a copy, from `arbiter copies`.")],
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Drop a copy of models' files in host RAM; the next load makes another."""
    with front(url) as f:
        reply = f.send("DELETE", f"/arbiter/host_copies/{quote(copy)}")
    later = "is dropped" if reply["is_gone"] else "leaves with the last engine that has it open"
    show(as_json, reply, cell(f"{copy} {later}"))


FLOORS = {
    "device": "it is loaded now and stays",
    "host": "it may sleep, and does not leave host RAM",
    "cold": "it may leave",
}


def floor(
    model: Model,
    to: Annotated[
        Literal["device", "host", "cold"],
        typer.Argument(metavar="FLOOR", help="device, host or cold."),
    ],
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Say how far a model may fall: device, host (asleep at least), cold."""
    with front(url) as f:
        reply = f.send("PUT", f"/arbiter/residency/{quote(model)}", {"floor": to})
    show(as_json, reply, cell(f"{model} has the floor {to}: {FLOORS[to]}"))


def settings(
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Changes, all or none of which are made; `KEY=` restores the default.",
        ),
    ] = None,
    generation: Annotated[
        int | None, typer.Option(help="Refuse the change if settings have changed since this one.")
    ] = None,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Show the arbiter's settings, or change some while it runs.

    Values are YAML: `evict=cost_aware`, `bypass_count=4`, `tenants={acme: {maximum: 4 GiB}}`.
    """
    changed = _parsed(changes or [])
    with front(url) as f:
        reply = f.get("/arbiter/settings")
        if changed:
            of_generation = reply["generation"] if generation is None else generation
            body = {"generation": of_generation, "settings": changed}
            reply = f.send("PUT", "/arbiter/settings", body)
    value = {"generation": reply["generation"], **reply["settings"]}
    show(as_json, value, *(cell(f"{name}: {_as_yaml(v)}") for name, v in value.items()))


def _parsed(changes: list[str]) -> dict[str, Any]:
    """Raises BadParameter for what is no pair, CommandError for what is no YAML or no JSON."""
    import yaml

    parsed = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not (key and equals):
            raise typer.BadParameter(f"{change!r}: write KEY=VALUE, or KEY= for its default")
        try:
            parsed[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise CommandError(f"the value of {key} is not YAML: {error}") from error
        check_json(f"the value of {key}", parsed[key])
    return parsed


def _as_yaml(value: object) -> str:
    """Writes a value as `KEY=VALUE` takes it: JSON is YAML."""
    return value if isinstance(value, str) else json.dumps(value)


def forget(
    tenant: Annotated[str, typer.Argument(help="A tenant, as `arbiter key list` has it.")],
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Erase what a removed tenant left on every node, and its jobs, batches and files."""
    with front(url) as f:
        reply = f.send("DELETE", f"/arbiter/tenants/{quote(tenant, safe='')}/kept")
    text = f"what {reply['tenant']} left is being erased; `arbiter events` tells of it"
    if reply["ending"]:
        text += f"; {reply['ending']} jobs, batches or files go when their work has ended"
    show(as_json, reply, cell(text))


def drain(
    lease: Annotated[str, typer.Argument(help="A lease's id, as `arbiter leases` has it.")],
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Give a lease its notice, even where it is not preemptible."""
    with front(url) as f:
        reply = f.send("POST", f"/arbiter/leases/{quote(lease, safe='')}/drain")
    show(as_json, reply, cell(f"{reply['lease']} has its notice"))


def cleanup(as_json: AsJson = False, url: Url = None) -> None:
    """End leases with missed heartbeats."""
    with front(url) as f:
        reply = f.send("POST", "/arbiter/leases/cleanup")
    ended = ", ".join(reply["ended"]) or "none; every lease's heartbeats come through"
    show(as_json, reply, cell(f"ended: {ended}"))
