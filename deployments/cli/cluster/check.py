"""`arbiter check FILE`: builds a configuration as Serve's controller will, and runs nothing of it.

Every key is checked by Serve's schema and ours; then every application's builder is called, every
deployment's options are applied to it, every policy is made, and every model's files are looked at.
The calls into Serve's private modules are those of its controller (application_state.py), so that
what passes here deploys; tests/commands/test_check.py holds them against Serve's next
version.
"""

import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from deployments.cli.output import AsJson, CommandError, clean, show, size, table, working

if TYPE_CHECKING:
    from ray.serve.config import DeploymentInfo
    from ray.serve.schema import ServeApplicationSchema

    from deployments.config.load_plan import ModelPlan
    from deployments.config.schema import Table

OUR_POLICY = "deployments.scaling:ArbiterPolicy"

# How importing and calling code of others commonly ends.
BROKEN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


def check(
    file: Annotated[Path, typer.Argument(help="A configuration, such as serve_config.yaml.")],
    as_json: AsJson = False,
) -> None:
    """Name every wrong key of a configuration, and what each model needs."""
    from deployments.config.config_file import check_file
    from deployments.config.schema import ConfigError

    with working(f"building {file}"):
        plans: dict[str, ModelPlan] = {}
        warnings: list[str] = []
        try:
            config = check_file(file)
        except ConfigError as error:
            problems = str(error).splitlines()
        except BROKEN as error:  # Serve's schema imports request routers
            problems = [f"{file}: {_cause(error)}"]
        else:
            problems = [*built(file, config), *_planned(config, plans)]
            warnings = [] if problems else _warnings(config, plans)
    if problems:
        if as_json:
            show(as_json, {"ok": False, "problems": problems})
        raise CommandError("\n".join((f"{file} must not be deployed:", *problems)))
    needs = {model: made.need.device_bytes for model, made in plans.items()}
    rows = [(model, size(need)) for model, need in needs.items()]
    heads = ("model", "about, while resident")
    good = f"{file}: good, {len(needs)} models"
    report = {"ok": True, "need_bytes": needs, "warnings": warnings}
    yellow = (Text(clean(sentence), "yellow") for sentence in warnings)
    show(as_json, report, good, table(heads, rows, numbers=heads[1:]), *yellow)


def _warnings(table: "Table", plans: "dict[str, ModelPlan]") -> list[str]:
    """What deploys, and will not do what it says, by what the state file has of earlier loads."""
    from arbiter.server.state_path import default_path
    from arbiter.server.store import learned_rows
    from deployments.tasks.budgets import broken_budgets

    file = table.arbiter.state_file
    return [*broken_budgets(table, plans, learned_rows(Path(file) if file else default_path()))]


def _planned(table: "Table", plans: "dict[str, ModelPlan]") -> Iterator[str]:
    """Fills in the plan of each model; yields what is wrong with its files or engine."""
    from deployments.config.load_plan import plan
    from deployments.config.schema import ConfigError

    for name, capability in table.capabilities.items():
        for model in capability.models:
            try:
                plans[model] = plan(model, capability)
            except (ConfigError, OSError) as error:
                yield f"front.user_config.capabilities.{name}.models.{model}: {error}"


def built(path: Path, table: "Table") -> Iterator[str]:
    """What fails when the applications and policies of a file with this table are built: a line
    for each, which begins with the key. Starts no cluster."""
    import yaml
    from ray.serve.schema import ServeDeploySchema

    from deployments.config import boot

    if (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)  # as `serve run` does, for builders beside the file
    try:
        boot.boot(table)
    except ValueError as error:
        yield f"front.user_config: {error}"
    applications = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text())).applications
    yield from _capabilities(table, {app.name for app in applications})
    for app in applications:
        where = f"applications.{app.name}"
        yield from _application(app, where)
        policy = app.autoscaling_policy
        if policy is not None:
            yield from _policy(policy, f"{where}.autoscaling_policy")
            yield from _followed(app, table, f"{where}.autoscaling_policy.policy_kwargs")


def _capabilities(table: "Table", theirs: set[str]) -> Iterator[str]:
    """Builds what the front will deploy: the rows without an application in the file."""
    from ray.serve._private.build_app import build_app

    from deployments import app
    from deployments.config.schema import ConfigError

    for name in sorted(table.capabilities.keys() - theirs):
        try:
            build_app(app.of_table(name, table.capabilities[name]), name=name)
        except ConfigError as error:
            yield f"front.user_config.capabilities.{name}.{error}"


def _application(app: "ServeApplicationSchema", where: str) -> Iterator[str]:
    from ray._common.utils import import_attr
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
    from ray.serve._private.build_app import build_app
    from ray.serve._private.deployment_info import DeploymentInfo
    from ray.serve.exceptions import RayServeException

    try:
        builder = import_attr(app.import_path)
    except BROKEN as error:
        yield f"{where}.import_path: {app.import_path}: {_cause(error)}"
        return
    try:
        bound = call_user_app_builder_with_args_if_necessary(builder, app.args)
        application = build_app(bound, name=app.name)
        application.validate_single_fastapi_ingress()
    except (*BROKEN, RayServeException) as error:
        yield f"{where}.args: {app.import_path}: {_cause(error)}"
        return
    infos = {
        d.name: DeploymentInfo(d._deployment_config, d._replica_config, 0, "")
        for d in application.deployments
    }
    yield from _deployments(app, infos, where)


def _deployments(
    app: "ServeApplicationSchema", infos: "dict[str, DeploymentInfo]", where: str
) -> Iterator[str]:
    """Yields what is wrong with the options of the application's deployments. Each block is
    applied alone, so that a problem is known to be that block's."""
    from ray.serve._private.application_state import override_deployment_info
    from ray.serve.exceptions import RayServeException

    for block in app.deployments:
        place = f"{where}.deployments.{block.name}"
        try:
            override_deployment_info(infos, app.model_copy(update={"deployments": [block]}))
        except (*BROKEN, RayServeException) as error:
            yield f"{place}: {_cause(error)}"
        scaling = block.autoscaling_config
        if isinstance(scaling, dict) and scaling.get("policy"):
            yield from _policy(scaling["policy"], f"{place}.autoscaling_config.policy")


def _policy(section: dict[str, Any], where: str) -> Iterator[str]:
    """Imports a scaling policy, and makes it where it is a class."""
    from ray.serve.config import AutoscalingPolicy

    fields = set(AutoscalingPolicy.model_fields)
    if unknown := sorted(section.keys() - fields):
        yield f"{where}: unknown key {unknown[0]!r}; known: {', '.join(sorted(fields))}"
    try:
        policy = AutoscalingPolicy(**section)
        policy_callable = policy.get_policy()
    except BROKEN as error:
        yield f"{where}.policy_function: {section.get('policy_function')}: {_cause(error)}"
        return
    if inspect.isclass(policy_callable):
        try:
            policy_callable(**policy.policy_kwargs)
        except BROKEN as error:
            yield f"{where}.policy_kwargs: {policy.policy_function}: {_cause(error)}"


def _followed(app: "ServeApplicationSchema", table: "Table", where: str) -> Iterator[str]:
    """Yields an error where the application names our policy with the name of a capability that it
    does not serve: Serve would scale it by the requests for the other one, without any error."""
    policy = app.autoscaling_policy or {}
    named = policy.get("policy_kwargs", {}).get("capability")
    serves = app.args.get("capability", app.name)
    if policy.get("policy_function") != OUR_POLICY or named in (None, serves):
        return
    there_is = ", ".join(sorted(table.capabilities))
    yield f"{where}.capability: {named!r}, but it serves {serves!r}; there is: {there_is}"


def _cause(error: Exception) -> str:
    """Returns the text of an error in one line; of a value that pydantic refused, what is wrong
    with each field."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        problems = error.errors(include_url=False)
        return "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in problems)
    return f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else str(error)
