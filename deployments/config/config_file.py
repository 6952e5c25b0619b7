"""Reads and checks a whole serve_config.yaml: the applications of Serve, and the front's table in
one of them.
"""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from deployments.config.fields import Strict
from deployments.config.schema import ConfigError, Table, explain, parse_table


class FrontArgs(Strict):
    """`args` of the front application; a change restarts the front."""


class CapabilityArgs(Strict):
    """`args` of a capability application that the file has."""

    capability: str  # a name in the table
    # `module:Class`, a subclass of Capability; absent: Capability itself
    class_: str | None = Field(None, alias="class", pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    max_replicas: int = Field(1, ge=1, le=64)  # as in CapabilityConfig


def check_file(path: Path) -> Table:
    """Reads and checks a whole serve_config.yaml; returns the front's table. Raises ConfigError."""
    import yaml
    from ray.serve.schema import DeploymentSchema, ServeDeploySchema

    try:
        raw = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a mapping with `applications:`")
    _refuse_unknown(raw, ServeDeploySchema, str(path))
    try:
        read = ServeDeploySchema.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(explain(error, str(path))) from error
    for app, application in zip(raw["applications"], read.applications, strict=True):
        app["name"] = application.name  # Serve's own, where the file says none
        for block in app.get("deployments", []):
            _refuse_unknown(block, DeploymentSchema, f"{path}: {app['name']}.{block['name']}")
    return _check_applications(raw["applications"], path)


def _refuse_unknown(raw: dict[str, Any], schema: type[BaseModel], where: str) -> None:
    fields = set(schema.model_fields)
    if unknown := sorted(set(raw) - fields):
        raise ConfigError(
            f"{where}: unknown key {unknown[0]!r}; known: {', '.join(sorted(fields))}"
        )


def _check_applications(applications: list[dict[str, Any]], path: Path) -> Table:
    by_name = {app["name"]: app for app in applications}
    blocks = by_name.get("front", {}).get("deployments") or [{}]
    if "user_config" not in blocks[0]:
        raise ConfigError(f"{path}: application `front` needs a deployment with `user_config`")
    table = parse_table(blocks[0]["user_config"], f"{path}: front.user_config")
    for name in ("front", "jobs"):
        if name in table.capabilities:
            raise ConfigError(
                f"{path}: capability {name!r} has the name of the application of our own {name}"
            )
    for name, app in by_name.items():
        if (
            name != "front"
            and app.get("args", {}).get("capability", name) not in table.capabilities
        ):
            raise ConfigError(f"{path}: application {name!r} serves a capability not in the table")
    return table
