"""The Serve applications of capabilities, deployed from the front's table: a capability is one row
of it, and no application in the file that a person edits (ADR 34). The application of jobs is
deployed with them.

An application that the file has under a capability's name is left to Serve. What is deployed as the
row says is left as it is, because Serve restarts every replica of what it is given again.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ray import serve
from ray.serve import Application
from ray.serve.context import _get_global_client
from ray.serve.schema import APIType, ApplicationStatus

from deployments import app
from deployments.config.schema import ConfigError, Table
from deployments.jobs import server as jobs

logger = logging.getLogger("ray.serve")

Details = Mapping[str, Any]  # of one application, as Serve's REST API has them
Scaling = Mapping[str, object]


class Serve(Protocol):
    """What is asked of Serve's controller; each call blocks."""

    def applications(self) -> dict[str, Details]: ...
    def run(self, applications: dict[str, Application]) -> None: ...
    def delete(self, name: str) -> None: ...


class Controller:
    """The controller of this cluster."""

    def applications(self) -> dict[str, Details]:
        applications: dict[str, Details] = _get_global_client().get_serve_details()["applications"]
        return applications

    def run(self, applications: dict[str, Application]) -> None:
        """Returns before they run: with zero replicas there is nothing to wait for."""
        targets = [serve.RunTarget(one, name, None) for name, one in applications.items()]
        serve.run_many(
            targets,
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    def delete(self, name: str) -> None:
        serve.delete(name, _blocking=False)


@dataclass(slots=True)
class CapabilityApps:
    """`causes`: capability to why its application could not be built, of the last table."""

    serve: Serve = field(default_factory=Controller)
    causes: dict[str, str] = field(default_factory=dict)

    async def follow(self, table: Table) -> None:
        """Deploys rows that are new or other than before, and deletes those that are gone. Raises
        RayError, RayServeException."""
        await asyncio.to_thread(self._follow, table)

    def _follow(self, table: Table) -> None:
        # An application that Serve is deleting counts as gone. A failed deployment is tried again,
        # but not of an application of the file: the front's would take the place of the file's.
        applications = self.serve.applications().items()
        living = {n: one for n, one in applications if one["status"] != ApplicationStatus.DELETING}
        of_file = {name for name, one in living.items() if one["source"] == APIType.DECLARATIVE}
        deployed = {
            name: scaling_of(name, one)
            for name, one in living.items()
            if one["status"] != ApplicationStatus.DEPLOY_FAILED
        }
        self.causes = {}
        by_name: dict[str, Application] = {}
        for name, row in table.capabilities.items():
            try:
                if name not in of_file and not _is_as_wanted(
                    deployed.get(name), app.scaling_of(name, row)
                ):
                    by_name[name] = app.of_table(name, row)
            except ConfigError as error:
                logger.error("capability %s is not deployed: %s", name, error)
                self.causes[name] = f"its Serve application cannot be built: {error}"
        if not _equals(deployed.get(jobs.NAME), jobs.scaling_of(table)):
            by_name[jobs.NAME] = jobs.application(table)
        if by_name:
            self.serve.run(by_name)
        for name in deployed.keys() - of_file - table.capabilities.keys():
            if _is_of_front(deployed[name]):
                self.serve.delete(name)


def scaling_of(name: str, details: Details) -> Scaling | None:
    """The `autoscaling_config` of an application's deployment of the same name; None without."""
    deployment = details["deployments"].get(name, {}).get("deployment_config", {})
    scaling: Scaling | None = deployment.get("autoscaling_config")
    return scaling


def _is_of_front(scaling: Scaling | None) -> bool:
    """Whether the front deployed the application of which this is the scaling."""
    if scaling is None:
        return False
    policy: Any = scaling.get("policy")
    return bool(policy["policy_function"] == app.SCALING)


def _is_as_wanted(scaling: Scaling | None, target: Scaling) -> bool:
    """Whether the front deployed it as its row now is: the same class, code and options."""
    return _is_of_front(scaling) and _equals(scaling, target)


def _equals(scaling: Scaling | None, target: Scaling) -> bool:
    return scaling is not None and all(scaling.get(key) == value for key, value in target.items())
