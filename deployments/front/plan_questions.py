"""What the arbiter is asked in a dry run (K3)."""

from arbiter.core.reports.plan import PlanQuestion
from arbiter.core.types import Client, Priority
from arbiter.units import NodeId
from deployments.config.load_plan import ModelPlan


def of_model(
    home: str, made: ModelPlan, priority: Priority, tenant: str, node: NodeId | None = None
) -> PlanQuestion:
    """What a request for a model of the capability `home` would bring about. `node`: None: any."""
    return PlanQuestion(
        home,
        made.model,
        made.need,
        made.need_is_explicit,
        made.settings_key,
        priority,
        Client(tenant),
        made.split,
        node,
    )
