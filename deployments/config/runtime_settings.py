"""The arbiter's settings while it runs (C12): read, and changed all or nothing.

A change names the generation it was made of. It is checked as a whole, takes effect as a whole, and
is kept across restarts until the configuration file itself says something else.
"""

from dataclasses import dataclass
from typing import Any

from arbiter.client.admin import call_arbiter
from arbiter.units import Generation
from deployments.config import boot
from deployments.config.arbiter_section import ArbiterConfig
from deployments.config.schema import ConfigError, Table, parse_table

Plain = dict[str, Any]
# Settings that are read only when the arbiter or its node agents start.
AT_START_ONLY = frozenset(
    {
        "state_file",
        "event_file",
        "spare_workers",
        "host_pool",
        "disk_pool",
        "pool_sweep_s",
        "replay_s",
    }
)
POLICIES = frozenset({"evict", "admit"})


@dataclass(frozen=True, slots=True)
class Config:
    """What may be changed while all runs, as one generation."""

    generation: int
    table: Table

    @property
    def plain(self) -> Plain:
        """Tasks and settings, each with every value."""
        tasks = {name: task.model_dump(mode="json") for name, task in self.table.tasks.items()}
        settings = self.table.arbiter.model_dump(mode="json")
        return {"generation": self.generation, "tasks": tasks, "settings": settings}


async def read() -> Plain:
    """The generation, and every setting with its value. Raises ArbiterUnavailable."""
    return _as_config(await call_arbiter("state"))


async def change(generation: int, section: Plain) -> Plain:
    """Changes some of the settings of this generation; None: the default. Returns what `read`
    does. Raises ConfigError naming each wrong key, SettingsConflict, ArbiterUnavailable."""
    _check(section)
    state = await call_arbiter("state")
    generation, table = await _changed(generation, state["table"], section, "settings")
    return _as_config({"generation": generation, "table": boot.as_plain(table)})


async def read_config() -> Config:
    """The generation, the tasks and the settings. Raises ArbiterUnavailable."""
    state = await call_arbiter("state")
    return Config(state["generation"], parse_table(state["table"], "the arbiter's table"))


async def change_config(generation: int, settings: Plain, tasks: Plain | None) -> Config:
    """Changes settings as `change` does and replaces all tasks (None: they stay), both or
    neither."""
    _check(settings)
    plain = (await call_arbiter("state"))["table"]
    table = plain if tasks is None else plain | {"tasks": tasks}
    return Config(*await _changed(generation, table, settings, "config"))


def _check(section: Plain) -> None:
    """Raises ConfigError for settings that only the file may have."""
    if fixed := sorted(AT_START_ONLY & section.keys()):
        raise ConfigError(f"settings.{fixed[0]}: only read when the arbiter starts")
    for name in sorted(POLICIES & section.keys()):
        if ":" in str(section[name]):  # an API key must not choose what is imported
            raise ConfigError(f"settings.{name}: only serve_config.yaml may name a module")


async def _changed(generation: int, plain: Plain, settings: Plain, where: str) -> tuple[int, Table]:
    """The new generation, and its table."""
    mine = plain.get("arbiter", {}) | settings
    arbiter = {key: value for key, value in mine.items() if value is not None}
    table = parse_table(plain | {"arbiter": arbiter}, where)
    of = Generation(generation)
    return await call_arbiter("change_settings", boot.configuration(table), of), table


def _as_config(state: Plain) -> Plain:
    own = ArbiterConfig.model_validate(state["table"].get("arbiter", {}))
    return {"generation": state["generation"], "settings": own.model_dump(mode="json")}
