"""Begins an epoch: its number, event log, core and recording, from what the state file kept of the
epochs before it.
"""

import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from arbiter.core.decisions import EventKind, LogEvent
from arbiter.protocol import messages
from arbiter.server.day_replays import DayReplays
from arbiter.server.event_log import EventLog
from arbiter.server.job_book import JobBook
from arbiter.server.node_agents import RayAgents
from arbiter.server.recording import Recorder, RecordingHeader
from arbiter.server.shell import Shell, monotonic
from arbiter.server.status_log import opened
from arbiter.server.store import Store
from arbiter.units import Epoch


def begin(
    boot: messages.StartConfig,
    chosen: messages.Configuration,
    store: Store,
    jobs: JobBook,
    agents: RayAgents,
    start: Callable[[Coroutine[Any, Any, None]], None],
) -> Shell:
    """Returns the shell around a new core. The core is made from a heading, so that a recording of
    this epoch begins as it did. `start`: begins a task that lasts as long as the arbiter at most.
    """
    epoch = store.next_epoch()
    log = EventLog(epoch, Path(boot.event_file) if boot.event_file else None)
    heading = _heading(store, chosen, epoch)
    core, module = heading.core(chosen.policies), boot.replay_module
    day = DayReplays(module, chosen.settings, monotonic) if module else None
    shell = Shell(
        core,
        epoch,
        agents,
        log,
        recorder=_recorder(store, heading, log),
        day=day,
        jobs=jobs,
        statuses=opened(core, epoch, monotonic),
    )
    if day:
        start(day.run(boot.replay_s))
    return shell


def _heading(store: Store, chosen: messages.Configuration, epoch: Epoch) -> RecordingHeader:
    holders = tuple(sorted(member.holder for member in store.members()))
    now = time.time()
    return RecordingHeader(
        messages.protocol_hash(),
        chosen.settings,
        epoch,
        holders,
        store.learned(),
        monotonic(),
        store.floors(),
        store.accounts(),
        store.usage(),
        {name: max(0.0, now - at) for name, at in store.removed_tenants().items()},
        store.removed_models(),
        store.removing(),
        store.asked(),
    )


def _recorder(store: Store, heading: RecordingHeader, log: EventLog) -> Recorder | None:
    """Returns the recorder of this epoch, if it is to be recorded. A file that cannot be written
    costs the recording, not the arbiter."""
    path = store.recording()
    if path is None:
        return None
    try:
        return Recorder(Path(path), heading)
    except OSError as error:
        log.tell(LogEvent(EventKind.NOT_RECORDED, {"cause": str(error)}))
        return None
