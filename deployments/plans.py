"""What a holder knows of its capability's models: the table as the arbiter last handed it over."""

import asyncio
import logging

from arbiter.errors import ArbiterUnavailable, LoadFailed, UnknownCapability, UnknownModel
from arbiter.wire import Plain
from deployments.config import CapabilityConfig, ConfigError, Table, parse_table
from deployments.plan import ModelPlan, plan

logger = logging.getLogger("arbiter.residency")


class Plans:
    """Plans of one capability's models, made when first needed."""

    def __init__(self, capability: str) -> None:
        self._capability = capability
        self._table: Table | None = None
        self._made: dict[str, ModelPlan] = {}

    @property
    def known(self) -> bool:
        return self._table is not None

    def take(self, raw: Plain) -> tuple[str, ...]:
        """Follow a new table from the next load on. Returns the models it pins."""
        try:
            self._table = parse_table(raw, "the arbiter's table")
        except ConfigError as error:
            logger.error("%s", error)
            return ()
        self._made.clear()
        mine = self._table.capabilities.get(self._capability)
        return tuple(m for m, config in mine.models.items() if config.pin) if mine else ()

    def forget(self, model: str) -> None:
        """Its files have changed: what was read of them no longer holds."""
        self._made.pop(model, None)

    async def of(self, model: str) -> ModelPlan:
        """Reads file headers, so in a thread. Raises UnknownModel and other RequestErrors."""
        while model not in self._made:  # again when the table changed meanwhile
            table, config = self._table, self._config()
            if model not in config.models:
                raise UnknownModel(model, self._capability, tuple(sorted(config.models)))
            try:
                made = await asyncio.to_thread(plan, model, config)
            except (ConfigError, OSError) as error:
                raise LoadFailed(model, str(error), False) from error
            if self._table is table:
                self._made[model] = made
        return self._made[model]

    def _config(self) -> CapabilityConfig:
        if self._table is None:
            raise ArbiterUnavailable(0.0)
        if self._capability not in self._table.capabilities:
            raise UnknownCapability(self._capability, tuple(sorted(self._table.capabilities)))
        return self._table.capabilities[self._capability]
