"""The application's policy, for one deployment started from Python, where Serve takes only a policy
per deployment.
"""

from typing import Any

from deployments.scaling import ArbiterPolicy


class OneDeployment(ArbiterPolicy):
    def __init__(self) -> None:
        super().__init__("chat")

    def __call__(self, context: Any) -> tuple[int, dict[Any, Any]]:  # type: ignore[override]
        return self.replicas(context), {}


one_deployment = OneDeployment
