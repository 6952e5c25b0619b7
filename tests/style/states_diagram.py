"""Writes docs/states.md from the tables of the arbiter and of the holder:
`python -m tests.style.states_diagram`.

tests/style checks that the file is what this makes, so the picture cannot drift from the code.
"""

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TypeVar

from arbiter.core.records.ticket import CHARGED, TRANSITIONS, State
from deployments.replica import held_model
from deployments.replica.held_model import HolderState

PATH = Path(__file__).parents[2] / "docs" / "states.md"

S = TypeVar("S", bound=Enum)

WHY: dict[tuple[State, State], str] = {
    (State.QUEUED, State.LOADING): "granted: bytes charged",
    (State.QUEUED, State.CLOSED): "refused, withdrawn, holder lost",
    (State.LOADING, State.RESIDENT): "loaded or awake",
    (State.LOADING, State.ASLEEP): "its wake was given up",
    (State.LOADING, State.RECLAIMING): "load broke, hung, withdrawn, holder lost",
    (State.RESIDENT, State.DRAINING): "revoked",
    (State.RESIDENT, State.RECLAIMING): "released, engine or holder lost",
    (State.DRAINING, State.RESIDENT): "busy, or the barrier dropped",
    (State.DRAINING, State.ASLEEP): "device bytes seen to have fallen",
    (State.DRAINING, State.RECLAIMING): "released, overdue, silent or lost",
    (State.ASLEEP, State.LOADING): "wake granted",
    (State.ASLEEP, State.RECLAIMING): "past keep-warm, host RAM needed, lost",
    (State.RECLAIMING, State.CLOSED): "bytes seen back",
}


HOLDER_WHY: dict[tuple[HolderState, HolderState], str] = {
    (HolderState.QUEUED, HolderState.LOADING): "granted",
    (HolderState.QUEUED, HolderState.ASLEEP): "wake refused, or its last request left",
    (HolderState.QUEUED, HolderState.CLOSED): "refused, or its last request left",
    (HolderState.LOADING, HolderState.QUEUED): "failed for memory: tried once more",
    (HolderState.LOADING, HolderState.RESIDENT): "loaded, awake, or its size changed",
    (HolderState.LOADING, HolderState.CLOSED): "failed, or ended by the arbiter",
    (HolderState.RESIDENT, HolderState.DRAINING): "revoked, its size changes, or its files did",
    (HolderState.RESIDENT, HolderState.CLOSED): "ended at once, or engine lost",
    (HolderState.DRAINING, HolderState.LOADING): "its size changes: empty",
    (HolderState.DRAINING, HolderState.RESIDENT): "barrier dropped",
    (HolderState.DRAINING, HolderState.UNLOADING): "revoked: empty",
    (HolderState.DRAINING, HolderState.CLOSED): "its files changed: empty, or ended at once",
    (HolderState.UNLOADING, HolderState.ASLEEP): "asleep",
    (HolderState.UNLOADING, HolderState.CLOSED): "unloaded",
    (HolderState.ASLEEP, HolderState.QUEUED): "requested: its wake is asked for",
    (HolderState.ASLEEP, HolderState.CLOSED): "ended, or engine lost",
}


def diagram() -> str:
    lines = ["stateDiagram-v2", "    [*] --> queued: requested"]
    for state in State:
        if state in CHARGED and state is not State.RECLAIMING:
            lines.append(f"    [*] --> {state.value}: rejoined")
    return "\n".join([*lines, *_arrows(TRANSITIONS, WHY)])


def holder_diagram() -> str:
    lines = ["stateDiagram-v2", "    [*] --> queued: the first request"]
    return "\n".join([*lines, *_arrows(held_model.TRANSITIONS, HOLDER_WHY)])


def _arrows(table: Mapping[S, frozenset[S]], why: Mapping[tuple[S, S], str]) -> list[str]:
    lines = []
    for state, targets in table.items():
        for to in sorted(targets, key=list(table).index):
            lines.append(f"    {state.value} --> {to.value}: {why[(state, to)]}")
    return [*lines, "    closed --> [*]"]


def page() -> str:
    charged = ", ".join(s.value for s in State if s in CHARGED)
    return f"""# States of a ticket

Generated from `arbiter/core/records/ticket.py` by `python -m tests.style.states_diagram`;
do not edit.

```mermaid
{diagram()}
```

Charged states: {charged}. In each of them a ticket is charged, on every device, the larger of what
it was granted and what it was measured to hold. Bytes leave the books only when they are seen back.

# States of a model on its holder

Generated from `deployments/replica/held_model.py`. The holder's view of the same ticket; only
`HeldModel.move` changes it.

```mermaid
{holder_diagram()}
```
"""


if __name__ == "__main__":
    PATH.write_text(page())
