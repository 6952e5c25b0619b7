"""What a recorded life says of the demand behind it."""

import pickle

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Reason, Revoke, Tier
from arbiter.replay.recorded import DemandReader, demand_of
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


def asked_on(reader: DemandReader, node: str, *at: float) -> None:
    """The life of a node on which one holder asked at these times."""
    holder = HolderId(f"h-{node}")
    reader.read(ev.NodeSeen(NodeId(node), ()), s(at[0]), [])
    reader.read(ev.Joined(holder, NodeId(node), "text", ()), s(at[0]), [])
    for t in at:
        ticket = TicketId(f"{node}.{t}")
        asked = ev.Requested(ticket, holder, "text", "a", types.Need(gib(1)))
        reader.read(asked, s(t), [])
        reader.read(ev.Loaded(ticket, seconds(2)), s(t), [])


@pytest.mark.spec("K2", "A19")
def test_node_that_left_is_forgotten_once_no_use_of_it_is_kept() -> None:
    reader = DemandReader(most_uses_count=10)
    reader.read(ev.CapabilitiesSet((TEXT,)), s(0), [])
    asked_on(reader, "leaver", 1, 2)
    asked_on(reader, "stays", 3, 4)
    for holder, node in (("h-leaver", "leaver"), ("other", "empty")):
        reader.read(ev.NodeLost(NodeId(node)), s(5), [])
        reader.read(ev.HolderLost(HolderId(holder)), s(5), [])
    assert [seat.node for seat in reader.demand().seats] == ["leaver", "stays"]
    asked_on(reader, "stays", *range(10, 20))  # the oldest uses go
    assert len(reader.demand().uses) <= 10
    reader.read(ev.NodeLost(NodeId("empty")), s(30), [])
    assert [seat.node for seat in reader.demand().seats] == ["stays"]
    assert b"leaver" not in pickle.dumps(reader)
    asked_on(reader, "stays", 40)
    assert reader.demand().seats[0].load == seconds(2)


@pytest.mark.spec("K2")
def test_revoke_of_a_ticket_that_is_not_known_is_not_remembered() -> None:
    reader = DemandReader()
    lost = Revoke(TicketId("lost"), HolderId("h"), Reason.LOST, Tier.GONE, s(1))
    reader.read(ev.TimerFired(), s(1), [lost])
    assert b"lost" not in pickle.dumps(reader._revoked_at)


@pytest.mark.spec("K2")
def test_a_lease_takes_no_place_of_the_uses_that_a_replay_needs() -> None:
    """It is in use at each heartbeat, and a replay leaves it out."""
    reader, holder = DemandReader(most_uses_count=10), HolderId("h-n")
    reader.read(ev.CapabilitiesSet((TEXT,)), s(0), [])
    asked_on(reader, "n", 1)
    terms = types.LeaseConditions("t", seconds(60), seconds(1))
    need = types.Need(gib(1))
    reader.read(ev.Requested(TicketId("job"), holder, "text", "job", need, lease=terms), s(2), [])
    phase = types.Phase.RESIDENT
    held = ev.HeldTicket(TicketId("job"), "job", phase, 0, seconds(0), (), need, lease=terms)
    for t in range(3, 30):
        reader.read(ev.Renewed(holder, (held,)), s(t), [])
    assert b"job" not in pickle.dumps(reader)
    assert len(reader.demand().uses) == 1
