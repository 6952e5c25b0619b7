"""Writes docs/states.md from the ledger's table: `python -m tests.style.states_diagram`.

tests/style checks that the file is what this makes, so the picture cannot drift from the code.
"""

from pathlib import Path

from arbiter.core.records.ticket import CHARGED, TRANSITIONS, State

PATH = Path(__file__).parents[2] / "docs" / "states.md"

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


def diagram() -> str:
    lines = ["stateDiagram-v2", "    [*] --> queued: requested"]
    for state in State:
        if state in CHARGED and state is not State.RECLAIMING:
            lines.append(f"    [*] --> {state.value}: rejoined")
    for state, targets in TRANSITIONS.items():
        for to in sorted(targets, key=lambda s: list(State).index(s)):
            lines.append(f"    {state.value} --> {to.value}: {WHY[(state, to)]}")
    lines.append("    closed --> [*]")
    return "\n".join(lines)


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
"""


if __name__ == "__main__":
    PATH.write_text(page())
