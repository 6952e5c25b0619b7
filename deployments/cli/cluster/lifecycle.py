"""Commands that join the Ray cluster, because they must work when no front does: upgrade, down."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from deployments.cli.http import CONNECT_S
from deployments.cli.output import AsJson, CommandError, show, working

Address = Annotated[
    str, typer.Option(help="The Ray cluster, as HOST:PORT; auto: the one on this machine.")
]


@contextmanager
def connected(address: str) -> Iterator[None]:
    """This process joins the cluster; what Ray fails with becomes a CommandError.

    Clusters that `serve run` starts ask for a token, which Ray keeps in the home folder. Ray finds
    out whether to read it as it is imported, so nothing may import Ray before.
    """
    if (Path.home() / ".ray" / "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    import ray
    from ray.exceptions import RayError

    try:
        _reach(address)
        ray.init(address, log_to_driver=False, logging_level="ERROR", namespace="arbiter")
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        raise CommandError(
            f"no Ray cluster at {address!r}: {error}. Is it running (`make serve`), is --address"
            " its HOST:PORT, and ~/.ray/auth_token its token?"
        ) from error
    try:
        yield
    except RayError as error:
        raise CommandError(
            f"the arbiter did not do it: {error}. `arbiter status` and `ray status` say what lives"
        ) from error
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Raises ConnectionError at once where nothing listens; Ray would try for two minutes."""
    host, _, port = address.rpartition(":")
    if not host or "://" in address or not port.isdecimal():
        return  # a name that Ray knows how to find
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        raise ConnectionError(str(error)) from error


def upgrade(address: Address = "auto", as_json: AsJson = False) -> None:
    """Replace the running arbiter by the installed version; engines and requests go on."""
    with working("joining the cluster") as now, connected(address):
        from arbiter.client.admin import upgrade_arbiter
        from deployments.config import boot
        from deployments.config.schema import ConfigError

        now("replacing the arbiter and its node agents")
        try:
            report = upgrade_arbiter(boot.read)
        except ConfigError as error:
            raise CommandError(
                f"nothing was changed: this version refuses the running configuration: {error}"
            ) from error
    show(as_json, report, *_lines(report))


def down(address: Address = "auto", as_json: AsJson = False) -> None:
    """Unload what is idle, wait for the rest (bounded), end the arbiter and its agents."""
    with working("joining the cluster") as now, connected(address):
        from arbiter.client.admin import stop_arbiter

        now("unloading, and waiting for requests in flight for at most 30 s")
        report = stop_arbiter()
    show(as_json, report, *_lines(report))


def _lines(report: dict[str, object]) -> list[RenderableType]:
    return [f"{name.replace('_', ' ')}: {value}" for name, value in report.items()]
