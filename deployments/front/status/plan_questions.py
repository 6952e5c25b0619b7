"""What the arbiter is asked in a dry run (K3)."""

from arbiter.core.reports.plan import PlanQuestion
from arbiter.core.types import Client, Priority
from arbiter.units import NodeId
from deployments.config.load_plan import ModelPlan


def of_model(
    home: str, load_plan: ModelPlan, priority: Priority, tenant: str, node: NodeId | None = None
) -> PlanQuestion:
    """What a request for a model of the capability `home` would bring about. `node`: None: any."""
    return PlanQuestion(
        home,
        load_plan.model,
        load_plan.need,
        load_plan.need_is_explicit,
        load_plan.settings_key,
        priority,
        Client(tenant),
        load_plan.split,
        node,
    )
