"""The `arbiter` command: see what holds memory, check a configuration, replace or end the arbiter.

`status` and `events` ask the front over HTTP, so they work from anywhere; `upgrade` and `down` join
the Ray cluster, because they must work when no front does.
"""

import argparse
import ipaddress
import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import quote

from arbiter.errors import ArbiterError, RequestError
from arbiter.leases import LeaseLost, said_in
from arbiter.units import GIB, Bytes, human
from deployments import lease_commands
from deployments.front import key_commands, keys
from deployments.whatif import add_whatif, run_whatif

URL = "http://127.0.0.1:8000"
HTTP_TIMEOUT_S = 30.0  # twice the longest silence of the event stream


class CommandError(Exception):
    """Said to the person at the terminal; exit status 1."""


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except (CommandError, keys.KeyTrouble, ArbiterError) as error:
        print(f"arbiter {args.command}: {error}", file=sys.stderr)
        return 1
    except (BrokenPipeError, KeyboardInterrupt):  # the reader has seen enough
        sys.stderr.close()
        return 0
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="arbiter", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    as_json = argparse.ArgumentParser(add_help=False)
    as_json.add_argument("--json", action="store_true", help="for machines")
    http = argparse.ArgumentParser(add_help=False)
    default = os.environ.get("ARBITER_URL", URL)
    http.add_argument(
        "--url", default=default, help="the front (default: $ARBITER_URL or %(default)s)"
    )
    ray = argparse.ArgumentParser(add_help=False)
    ray.add_argument("--address", default="auto", help="the Ray cluster (default: %(default)s)")

    def add(name: str, run: Any, about: str, *parents: Any) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=about, description=about, parents=list(parents))
        command.set_defaults(run=run)
        return command

    add("status", status, "Devices, tickets, queue and cool-downs.", as_json, http)
    events_of = add("events", events, "What happened, newest last.", as_json, http)
    events_of.add_argument("--follow", action="store_true", help="go on as it happens")
    events_of.add_argument("--after", type=int, default=0, help="sequence number to start behind")
    why = add("explain", explain, "Why a ticket waits, or why it went.", as_json, http)
    why.add_argument("ticket", help="as `arbiter status` and `arbiter events` name it")
    record_to = add("record", record, "Every event into a file, from now on.", as_json, ray)
    record_to.add_argument("file", nargs="?", help="on the arbiter's node; none: stop recording")
    replayed = add("whatif", run_whatif, "A recording under other policies.", as_json)
    add_whatif(replayed)
    add("clients", clients, "Who has used what, and what tenants may have.", as_json, http)
    add("check", check, "Name every wrong key of a configuration.", as_json).add_argument("file")
    add("upgrade", upgrade, "Replace the running arbiter by the installed version.", as_json, ray)
    add("down", down, "Unload, wait (bounded), end the arbiter and its agents.", as_json, ray)
    lease_commands.add_to(add, lease, http)
    add("leases", leases_held, "Memory lent to processes outside Serve.", as_json, http)
    add("drain", drain, "Give a lease its notice.", as_json, http).add_argument("lease")
    add("cleanup", clean_up, "End leases whose holder does not beat.", as_json, http)
    add("residency", residency, "Where each model is, and where it is to be.", as_json, http)
    for name, about in BY_HAND.items():
        add(name, by_hand, about, as_json, http).add_argument("model")
    set_to = add("settings", settings, "Show settings, or change some.", as_json, http)
    set_to.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="all of them or none")
    set_to.add_argument("--generation", type=int, help="refuse if they have changed since")
    floor_of = add("floor", floor, "Say how far a model may fall.", as_json, http)
    floor_of.add_argument("model")
    floor_of.add_argument("floor", choices=("device", "host", "cold"))
    key_commands.add_parser(commands, as_json)
    return parser


# -- over HTTP ---------------------------------------------------------------------------------


def status(args: argparse.Namespace) -> None:
    state = json.load(_get(args.url, "/arbiter/state"))
    print(json.dumps(state, indent=2) if args.json else "\n".join(status_lines(state)))


def status_lines(state: dict[str, Any]) -> Iterator[str]:
    """The state as a person reads it."""
    yield f"arbiter {state['version']}, epoch {state['epoch']}, policy {state['policy']}"
    yield ""
    rows = [
        (d["device"], *(_size(d[f"{what}_bytes"]) for what in _DEVICE_COLUMNS))
        for d in state["devices"]
    ]
    yield from _table(("device", *_DEVICE_COLUMNS), rows)
    yield ""
    tickets = [
        (t["ticket"], t["capability"], t["model"], t["state"], t["inflight"], _charges(t))
        for t in state["tickets"]
    ]
    yield from _table(("ticket", "capability", "model", "state", "in flight", "charged"), tickets)
    for failure in state["cooldowns"]:
        yield f"cooling down: {failure['model']} for {failure['left_s']:.0f} s, {failure['cause']}"


def clients(args: argparse.Namespace) -> None:
    state = json.load(_get(args.url, "/arbiter/state"))
    found = {"tenants": state["tenants"], "clients": state["clients"]}
    print(json.dumps(found, indent=2) if args.json else "\n".join(client_lines(state)))


def client_lines(state: dict[str, Any]) -> Iterator[str]:
    """Limits first, where there are any, then accounts."""
    if state["tenants"]:
        head = ("tenant", "holds", "maximum", "reserved", "average", "of", "cooling down")
        yield from _table(
            head,
            [
                (
                    t["tenant"],
                    _size(t["held_bytes"]),
                    _most(t["most_bytes"]),
                    _size(t["reserved_bytes"]),
                    _size(t["average_bytes"]),
                    _most(t["average_most_bytes"]),
                    t["is_cooling"],
                )
                for t in state["tenants"]
            ],
        )
        yield ""
    yield from _table(
        ("tenant", "client", "requests", "holds", "GiB seconds"),
        [
            (
                c["tenant"],
                c["client"] or "-",
                c["requests_count"],
                _size(c["held_bytes"]),
                f"{c['byte_seconds_count'] / GIB:.1f}",
            )
            for c in state["clients"]
        ],
    )


def _most(size: int | None) -> str:
    return "any" if size is None else _size(size)


_DEVICE_COLUMNS = ("budget", "free", "charged", "measured", "foreign", "largest_fit")


def _charges(ticket: dict[str, Any]) -> str:
    charges = ticket["charged_bytes"].items()
    return ", ".join(f"{device.rpartition('/')[2]} {_size(size)}" for device, size in charges)


def events(args: argparse.Namespace) -> None:
    """One line an event."""
    for event in _follow(args) if args.follow else _recent(args):
        print(json.dumps(event) if args.json else event_line(event), flush=True)


def _recent(args: argparse.Namespace) -> list[dict[str, Any]]:
    answer = json.load(_get(args.url, f"/arbiter/events/recent?after={args.after}"))
    found: list[dict[str, Any]] = answer["events"]
    return found


def _follow(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for line in _get(args.url, f"/arbiter/events?after={args.after}"):
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def event_line(event: dict[str, Any]) -> str:
    known = ("seq", "kind", "unix_s", "ticket", "size_bytes", "took_s")
    parts = [f"{event['seq']:>6}", f"{event['kind']:<16}", event.get("ticket") or ""]
    if event.get("size_bytes") is not None:
        parts.append(_size(event["size_bytes"]))
    if event.get("took_s") is not None:
        parts.append(f"{event['took_s']:.2f} s")
    parts += [f"{k}={v}" for k, v in event.items() if k not in known and v is not None]
    return "  ".join(part for part in parts if part)


def api_key(url: str) -> str:
    """$ARBITER_KEY, else, for a front on this machine only, the one that its first start left for
    the owner: a key with every scope is not sent to whatever address was typed."""
    if given := os.environ.get("ARBITER_KEY"):
        return given
    file = keys.first_key_path(keys.keys_path())
    is_here = _is_loopback(urllib.parse.urlsplit(url).hostname or "")
    return file.read_text().strip() if is_here and os.access(file, os.R_OK) else ""


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _get(url: str, path: str, method: str = "GET", body: object = None) -> HTTPResponse:
    headers = {"authorization": f"Bearer {key}"} if (key := api_key(url)) else {}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers, method=method)
    try:
        answer: HTTPResponse = urllib.request.urlopen(request, timeout=HTTP_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        raise CommandError(f"{url}{path}: {error.status}: {said_in(error.read())[1]}") from error
    except (urllib.error.URLError, TimeoutError) as error:
        raise CommandError(f"{url}: {error}; is the front running (`make serve`)?") from error
    return answer


def _size(size: int) -> str:
    return human(Bytes(size))


def _table(head: Iterable[str], rows: list[tuple[Any, ...]]) -> Iterator[str]:
    lines = [tuple(str(cell) for cell in row) for row in (tuple(head), *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        yield "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()


# -- leases ------------------------------------------------------------------------------------


def lease(args: argparse.Namespace) -> None:
    try:
        status_code = lease_commands.run(args, api_key(args.url))
    except (RequestError, LeaseLost, OSError) as error:
        raise CommandError(str(error)) from error
    raise SystemExit(status_code)


def leases_held(args: argparse.Namespace) -> None:
    found = json.load(_get(args.url, "/arbiter/leases"))["leases"]
    print(json.dumps(found, indent=2) if args.json else "\n".join(_lease_lines(found)))


def _lease_lines(found: list[dict[str, Any]]) -> Iterator[str]:
    head = ("lease", "name", "tenant", "state", "charged", "left", "preemptible")
    yield from _table(
        head,
        [
            (
                t["ticket"],
                t["model"],
                t["lease"]["tenant"],
                t["state"],
                _charges(t),
                f"{t['left_s']:.0f} s",
                t["lease"]["preemptible"],
            )
            for t in found
        ],
    )


def drain(args: argparse.Namespace) -> None:
    _say(args, json.load(_get(args.url, f"/arbiter/leases/{args.lease}/drain", "POST")))


def clean_up(args: argparse.Namespace) -> None:
    _say(args, json.load(_get(args.url, "/arbiter/leases/cleanup", "POST")))


# -- residency ---------------------------------------------------------------------------------


def residency(args: argparse.Namespace) -> None:
    models = json.load(_get(args.url, "/arbiter/residency"))["models"]
    print(json.dumps(models, indent=2) if args.json else "\n".join(_residency_lines(models)))


def _residency_lines(models: dict[str, Any]) -> Iterator[str]:
    rows = [
        (name, m["capability"], m["level"], m["floor"], _size(m["host_copy_bytes"]))
        for name, m in models.items()
    ]
    yield from _table(("model", "capability", "level", "floor", "host copy"), rows)


BY_HAND = {
    "load": "Load a model now.",
    "unload": "Unload a model once idle.",
    "grow": "Give a resident model what its `grow_to` says.",
    "shrink": "Take back what a model grew by.",
}


def by_hand(args: argparse.Namespace) -> None:
    _say(args, json.load(_get(args.url, f"/arbiter/models/{args.command}/{args.model}", "POST")))


def floor(args: argparse.Namespace) -> None:
    body = {"floor": args.floor}
    _say(args, json.load(_get(args.url, f"/arbiter/residency/{args.model}", "PUT", body)))


def settings(args: argparse.Namespace) -> None:
    """Values are YAML: `evict=cost_aware`, `bypass_count=4`, `tenants={acme: {maximum: 4 GiB}}`;
    nothing after the `=`: as by default."""
    import yaml

    found = json.load(_get(args.url, "/arbiter/settings"))
    if args.changes:
        pairs = [change.partition("=") for change in args.changes]
        try:
            wanted = {key: yaml.safe_load(value) for key, _, value in pairs}
        except yaml.YAMLError as error:
            raise CommandError(f"a value is not YAML: {error}") from error
        generation = found["generation"] if args.generation is None else args.generation
        body = {"generation": generation, "settings": wanted}
        found = json.load(_get(args.url, "/arbiter/settings", "PUT", body))
    _say(args, {"generation": found["generation"], **found["settings"]})


def explain(args: argparse.Namespace) -> None:
    found = json.load(_get(args.url, f"/arbiter/explain/{quote(args.ticket, safe='')}"))
    print(json.dumps(found, indent=2) if args.json else "\n".join(found["said"]))


# -- configuration -----------------------------------------------------------------------------


def check(args: argparse.Namespace) -> None:
    from deployments.config.load_plan import plan
    from deployments.config.schema import ConfigError, check_file

    try:
        table = check_file(Path(args.file))
        needs = {
            model: plan(model, capability).need.device_bytes
            for capability in table.capabilities.values()
            for model in capability.models
        }
    except ConfigError as error:
        raise CommandError(str(error)) from error
    if args.json:
        print(json.dumps({"ok": True, "need_bytes": needs}))
        return
    print(f"{args.file}: good")
    for model, need in needs.items():
        print(f"  {model}: about {_size(need)} while resident")


# -- through Ray -------------------------------------------------------------------------------


def upgrade(args: argparse.Namespace) -> None:
    _connect(args.address)
    from arbiter.client.admin import upgrade_arbiter
    from deployments.config import boot
    from deployments.config.schema import ConfigError

    try:
        _say(args, upgrade_arbiter(boot.read))
    except ConfigError as error:
        raise CommandError(f"nothing was changed: {error}") from error


def record(args: argparse.Namespace) -> None:
    _connect(args.address)
    from arbiter.client.admin import record_arbiter

    _say(args, record_arbiter(str(Path(args.file).absolute()) if args.file else None))


def down(args: argparse.Namespace) -> None:
    _connect(args.address)
    from arbiter.client.admin import stop_arbiter

    _say(args, stop_arbiter())


def _say(args: argparse.Namespace, report: dict[str, Any]) -> None:
    if args.json:
        print(json.dumps(report))
        return
    for key, value in report.items():
        print(f"{key}: {value}")


def _connect(address: str) -> None:
    """Clusters that `serve run` starts ask for a token, which Ray keeps in the home folder. Whether
    it is to be read Ray finds out as it is imported, so nothing may import it before."""
    if (Path.home() / ".ray" / "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    import ray

    try:
        ray.init(address, log_to_driver=False, logging_level="ERROR", namespace="arbiter")
    except ConnectionError as error:
        raise CommandError(f"no Ray cluster at {address!r}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
