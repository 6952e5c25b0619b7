"""Whether the budgets of tasks can be kept, by what was measured; `arbiter check` tells."""

from collections.abc import Iterator
from typing import Any

from arbiter.core.records.estimates import Estimates, ModelKey
from arbiter.core.types import ModelName
from arbiter.units import in_seconds
from deployments.config.adapter_names import base_of
from deployments.config.load_plan import ModelPlan
from deployments.config.schema import Table


def broken_budgets(
    table: Table, plans: dict[str, ModelPlan], learned: list[dict[str, Any]]
) -> Iterator[str]:
    """A sentence for each rung whose load and run, the longest of the newest, take longer than its
    task's budget, and for each of which neither was seen. `learned`: the rows of the state file."""
    estimates = Estimates(table.arbiter.as_settings())
    estimates.restore(learned)
    for task, config in sorted(table.tasks.items()):
        for name in config.ladder if config.budget_s is not None else ():
            model = base_of(name)
            if model not in plans:
                continue  # a remote, of which its own section says what it may take
            assert config.budget_s is not None
            where = f"tasks.{task}: {name}"
            yield from _broken(estimates, table.homes[model], plans[model], config.budget_s, where)


def _broken(
    estimates: Estimates, home: str, plan: ModelPlan, budget_s: float, where: str
) -> Iterator[str]:
    key = ModelKey(home, plan.model, plan.settings_key)
    load_s = in_seconds(estimates.load_time(key, plan.need.weights_bytes))
    runs = estimates.run_times(ModelName(home, plan.model))
    run_s = in_seconds(runs.long) if runs else 0.0
    if not load_s:
        yield f"{where}: no load was seen yet, so its budget of {budget_s:.1f} s is not checked"
    elif load_s + run_s > budget_s:
        ran = f"a run of up to {run_s:.1f} s (99th percentile)" if runs else "no run was seen"
        yield (
            f"{where}: the budget of {budget_s:.1f} s is less than a cold request takes: a load of "
            f"{load_s:.1f} s, and {ran}; raise it, or give the model a floor"
        )
