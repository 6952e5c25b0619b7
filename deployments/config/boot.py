"""From the table a person wrote to what the arbiter and the node agents are started with."""

from pathlib import Path
from typing import Any

from arbiter.protocol.messages import AgentSettings, Configuration, StartConfig
from arbiter.units import Bytes
from deployments.adapters.catalogue import FETCHED
from deployments.config.engine_kinds import engine_kind
from deployments.config.environment import Environment
from deployments.config.outside_policies import outside
from deployments.config.schema import Table, parse_table
from policies import bundle

ZYGOTE = "deployments.engines.zygote"
DAY_REPLAY = "deployments.monitoring.day_replay"


def configuration(table: Table) -> Configuration:
    settings = table.arbiter.as_settings()
    return Configuration(
        settings, bundle(settings, outside(settings)), table.as_event(), as_plain(table)
    )


def boot(table: Table) -> StartConfig:
    """The zygote imports ahead what the table's engines need; an engine added later by a change
    of the table works as well, and imports for itself."""
    kinds = [engine_kind(c.engine) for c in table.capabilities.values()]
    preload = tuple(dict.fromkeys(module for kind in kinds for module in kind.preload))
    pool, disk = table.arbiter.host_pool, table.arbiter.disk_pool
    agent = AgentSettings(
        ZYGOTE,
        preload,
        spares_count=table.arbiter.spare_workers,
        pool_bytes=None if pool is None else Bytes(pool),
        slabs_folder=str(_slabs_folder(table)),
        disk_bytes=None if disk is None else Bytes(disk),
        sweep_s=table.arbiter.pool_sweep_s,
        tenant_folders=(str(copies := Environment().adapters), str(copies / FETCHED)),
    )
    replay_s = table.arbiter.replay_s
    return StartConfig(
        configuration(table),
        agent,
        state_file=table.arbiter.state_file,
        event_file=table.arbiter.event_file,
        replay_module=DAY_REPLAY if replay_s else None,
        replay_s=replay_s,
    )


def _slabs_folder(table: Table) -> Path:
    """Returns the folder of slabs: beside the state file where one is named, else in the user's
    cache."""
    state_file = table.arbiter.state_file
    return Path(state_file).with_name("slabs") if state_file else Environment().slabs


def read(plain: dict[str, Any]) -> StartConfig:
    """Reads what `as_plain` made, perhaps in other code. Raises ConfigError."""
    return boot(parse_table(plain, "the arbiter's table"))


def as_plain(table: Table) -> dict[str, Any]:
    """JSON-able; `parse_table` reads it back."""
    return table.model_dump(mode="json", exclude_defaults=True)
