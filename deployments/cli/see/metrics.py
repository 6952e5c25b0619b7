"""`arbiter metrics install`: a dashboard, alert rules, and how Prometheus scrapes the front."""

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from deployments.cli.http import Url, address
from deployments.cli.output import AsJson, CommandError, show

app = typer.Typer(no_args_is_help=True, help="Prometheus and Grafana: files to watch with.")


@app.callback()
def _group() -> None:
    """Prometheus and Grafana: files to watch with."""


@app.command()
def install(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where the files go; made if it is not there.")
    ] = Path("monitoring"),
    key: Annotated[
        bool, typer.Option("--key", help="The front asks for a key with the scope `view`.")
    ] = False,
    ray: Annotated[
        bool, typer.Option("--ray", help="Also put the dashboard into the Grafana of Ray.")
    ] = False,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Write a Grafana dashboard, alert rules, and a prometheus.yml that scrapes the front.

    Start Prometheus with `prometheus --config.file=DIR/prometheus.yml`, and import the dashboard
    into Grafana. Files of these names are replaced. With `--ray`, on the head node, a dashboard
    goes to where a Grafana with Ray's configuration finds it.
    """
    from deployments.monitoring.files import KEY, ray_folder, write, write_for_ray

    where = urlsplit(address(url))
    try:
        paths = write(folder, where.netloc, where.scheme, has_key=key)
    except OSError as error:
        raise CommandError(f"cannot write into {folder}: {error}") from error
    try:
        paths += [write_for_ray()] if ray else []
    except OSError as error:
        raise CommandError(f"cannot write into {ray_folder()}, of Ray: {error}") from error
    lines = [f"wrote {path}" for path in paths]
    if key:
        lines.append(f"`arbiter key add prometheus --scope view` makes a key for {folder / KEY}")
    show(as_json, {"files": [str(path) for path in paths]}, *lines)
