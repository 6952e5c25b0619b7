"""What a recorded life says of the demand behind it."""

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.replay.recorded import demand_of
from arbiter.server.recording import Step
from arbiter.units import HolderId, NodeId, TicketId, seconds
from tests.support.core_driver import capability, gib, s

TEXT = capability("text", "text", ("a",))
USED: list[ev.Event] = [
    ev.NodeSeen(NodeId("n"), ()),
    ev.Joined(HolderId("h"), NodeId("n"), "text", ()),
    ev.Requested(TicketId("t"), HolderId("h"), "text", "a", types.Need(gib(1))),
    ev.Loaded(TicketId("t"), seconds(2)),
]


def capabilities_of(*events: ev.Event) -> list[str]:
    """Those in the demand of a life with these events, after `a` was used."""
    steps = [Step(s(t), event, [], is_same=True) for t, event in enumerate([*USED, *events])]
    found = demand_of(steps)
    assert {seat.capability for seat in found.seats} == {c.name for c in found.table.capabilities}
    return [c.name for c in found.table.capabilities]


@pytest.mark.spec("A2", "N4")
def test_capability_of_the_table_stays_in_the_demand_when_its_registration_ends() -> None:
    table, both = ev.CapabilitiesSet((TEXT,)), ev.CapabilityRegistered(TEXT)
    gone = ev.CapabilityUnregistered("text")
    assert capabilities_of(table) == ["text"]
    assert capabilities_of(table, both, gone) == ["text"]
    assert capabilities_of(both, table, gone) == ["text"]
    assert capabilities_of(both) == ["text"]
    assert capabilities_of(both, gone) == []
