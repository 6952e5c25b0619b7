"""Everything a person may write into the front's `user_config` in serve_config.yaml.

One table for the whole system: the arbiter's settings and every capability with its models. The
front checks it, hands it to the arbiter, which keeps it and hands it to replicas, and deploys each
capability, so a change restarts nothing and a capability with zero replicas is known. Unknown keys
are refused by name.
"""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationError, model_validator

from arbiter.core import events as ev
from deployments.config.arbiter_section import ArbiterConfig
from deployments.config.capability_section import CapabilityConfig, plainly_named
from deployments.config.fields import Strict
from deployments.config.front_section import FrontConfig
from deployments.config.jobs_section import JobsConfig
from deployments.config.model_section import check_name
from deployments.config.remotes_section import RemotesConfig
from deployments.config.task_section import PREFIX, TaskConfig, check_ladders, named
from policies import ROLES


class Table(Strict):
    """The front's `user_config`."""

    front: FrontConfig = FrontConfig()
    arbiter: ArbiterConfig = ArbiterConfig()
    jobs: JobsConfig = JobsConfig()
    capabilities: Annotated[dict[str, CapabilityConfig], AfterValidator(plainly_named)]
    remotes: RemotesConfig = RemotesConfig()  # J5
    tasks: Annotated[dict[str, TaskConfig], AfterValidator(named)] = Field({})  # J5

    @model_validator(mode="after")
    def _known_rungs(self) -> "Table":
        check_ladders(self.tasks, self.homes, self.remotes.homes)
        return self

    @model_validator(mode="after")
    def _known_roles(self) -> "Table":
        for name, capability in self.capabilities.items():
            if self.arbiter.keep_warm_s_of(capability.role) is None:
                names = ", ".join(sorted(ROLES.keys() | self.arbiter.roles.keys()))
                raise ValueError(
                    f"capabilities.{name}.role: no role {capability.role!r}; there is: {names}, or "
                    "a new one in `arbiter.roles`"
                )
        return self

    @model_validator(mode="after")
    def _known_stages(self) -> "Table":
        for number, pipeline in enumerate(self.arbiter.pipelines):
            if unknown := [stage for stage in pipeline if stage not in self.capabilities]:
                names = ", ".join(sorted(self.capabilities))
                raise ValueError(
                    f"arbiter.pipelines[{number}]: no capability {unknown[0]!r}; there is: {names}"
                )
        return self

    @model_validator(mode="after")
    def _one_home_per_model(self) -> "Table":
        homes: dict[str, str] = {}
        for capability, config in self.capabilities.items():
            for model in config.models:
                if self.tasks and model == PREFIX.removesuffix(":"):
                    raise ValueError(f"model {model!r}: {PREFIX}NAME is the name of a task")
                if other := homes.setdefault(model, capability):
                    if other != capability:
                        raise ValueError(f"model {model!r} is in both {other!r} and {capability!r}")
        return self

    @model_validator(mode="after")
    def _remote_names_are_free(self) -> "Table":
        homes = self.homes
        for model, remote in self.remotes.homes.items():
            check_name(model)
            if model in homes:
                raise ValueError(
                    f"model {model!r} is both in {homes[model]!r} and at the remote {remote!r}"
                )
        return self

    @property
    def homes(self) -> dict[str, str]:
        """Model name to capability name."""
        return {m: name for name, c in self.capabilities.items() for m in c.models}

    @property
    def adapter_folders(self) -> dict[str, Path]:
        """Model name to adapter folder, as deployments.adapters.catalogue.Catalogue takes it."""
        return {
            m: Path(config.adapters.folder).expanduser()
            for c in self.capabilities.values()
            for m, config in c.models.items()
            if config.adapters
        }

    @property
    def adapter_urls(self) -> dict[str, tuple[str, ...]]:
        """Model name to the prefixes that its adapters may be fetched from."""
        models = [row for c in self.capabilities.values() for row in c.models.items()]
        return {m: config.adapters.urls for m, config in models if config.adapters}

    def as_event(self) -> ev.CapabilitiesSet:
        specs = []
        for name, config in sorted(self.capabilities.items()):
            keep_warm_s = self.arbiter.keep_warm_s_of(config.role)
            assert keep_warm_s is not None  # or `_known_roles` had refused the table
            specs.append(config.as_spec(name, keep_warm_s, self.arbiter.time_zone))
        return ev.CapabilitiesSet(tuple(specs))


class ConfigError(ValueError):
    """A configuration that must not start. The text names each key and what is wrong with it."""


def parse_table(raw: object, where: str = "user_config") -> Table:
    """Raises ConfigError that names every bad key."""
    try:
        return Table.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(explain(error, where)) from error


def explain(error: ValidationError, where: str) -> str:
    """Returns a line for each key that is wrong."""
    lines = [
        f"{where}.{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
        for problem in error.errors(include_url=False)
    ]
    return "\n".join(lines)
