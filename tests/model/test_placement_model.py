"""Where a load goes, for any history of loads, sleeps and departures on a node of several devices
(C9): what the core does against a chooser that looks at everything and is too simple to be
wrong. A sleeper wakes where it slept."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Grant, Revoke
from arbiter.core.records.ticket import State
from arbiter.units import Bytes, DeviceId, HolderId, NodeId, TicketId, seconds
from tests.support.core_driver import CoreDriver, gib
from tests.support.examples import examples

NODE, HOST = NodeId("g"), DeviceId("g/host")
DEVICES = {DeviceId("g/gpu:0"): 40, DeviceId("g/gpu:1"): 60, DeviceId("g/gpu:2"): 80}
MODELS, HOLDERS = "abcd", ("h0", "h1", "h2")
REFUSAL_S = 10
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["load", "load", "load", "leave", "to_sleep", "wake"]),
        st.sampled_from(MODELS), st.integers(0, 5),
    ),
    max_size=40,
)  # fmt: skip
SIZES = st.fixed_dictionaries({model: st.integers(5, 35) for model in MODELS})


@dataclass(frozen=True)
class DeviceView:
    """A device before a load."""

    device: DeviceId
    free_gib: float
    copies_count: int
    was_home: bool
    tickets_count: int


def naive(size: int, devices: list[DeviceView]) -> DeviceId | None:
    """Apart from its copies; of such devices where it was; else the smallest hole; else the least
    crowded. One wish after the other."""
    left = [d for d in devices if d.free_gib >= size]
    if not left:
        return None
    fewest = min(d.copies_count for d in left)
    left = [d for d in left if d.copies_count == fewest]
    left = [d for d in left if d.was_home] or left
    smallest = min(d.free_gib for d in left)
    left = [d for d in left if d.free_gib == smallest]
    calmest = min(d.tickets_count for d in left)
    return min(d.device for d in left if d.tickets_count == calmest)


class Node:
    def __init__(self, sizes: dict[str, int]) -> None:
        self.driver, self.sizes, self.now, self.number = CoreDriver(), sizes, 0.0, 0
        self.home: dict[str, DeviceId] = {}  # where each model was last
        self.held: dict[TicketId, dict[DeviceId, float]] = {}
        specs = [
            types.DeviceSpec(d, types.DeviceKind.GPU, gib(size)) for d, size in DEVICES.items()
        ]
        specs.append(types.DeviceSpec(HOST, types.DeviceKind.HOST, gib(5_000)))
        self.feed(ev.NodeSeen(NODE, tuple(specs)))
        self.read()
        for holder in HOLDERS:
            self.feed(ev.Joined(HolderId(holder), NODE, "text", ()))

    def feed(self, event: ev.Event) -> list[Grant | Revoke]:
        self.now += 1
        out = self.driver.at(self.now, event)
        return [d for d in out if isinstance(d, Grant | Revoke)]

    def read(self) -> None:
        free = tuple(ev.DeviceReading(d, gib(1e6), Bytes(0)) for d in (*DEVICES, HOST))
        engines = tuple(
            ev.EngineReading(t, tuple(types.DeviceBytes(d, gib(b)) for d, b in held.items()))
            for t, held in self.held.items()
        )
        self.feed(ev.Measured(NODE, free, engines))

    def seen(self, model: str) -> list[DeviceView]:
        """As the holders know it, without the arbiter's books."""
        rows = []
        for device, size in DEVICES.items():
            there = {t: held[device] for t, held in self.held.items() if device in held}
            copies = sum(t.startswith(model) for t in there)
            free = size - sum(there.values())
            rows.append(
                DeviceView(device, free, copies, self.home.get(model) == device, len(there))
            )
        return rows

    def ask(self, ticket: TicketId, holder: str) -> DeviceId | None:
        """Where it is granted; None: it waits, and does so no longer."""
        size = gib(self.sizes[ticket[0]])
        need = types.Need(size, host_bytes=size)
        out = self.feed(ev.Requested(ticket, HolderId(holder), "text", ticket[0], need, "", True))
        grants = [d for d in out if isinstance(d, Grant)]
        if not grants:
            self.feed(ev.Withdrawn(ticket))
            for revoke in out:
                self.feed(ev.BarrierDropped(revoke.ticket, 0))
            return None
        [part] = grants[0].devices
        assert (grants[0].ticket, part.size_bytes) == (ticket, size)
        self.feed(ev.Loaded(ticket, seconds(1)))
        self.home[ticket[0]] = part.device
        self.held[ticket] = {part.device: self.sizes[ticket[0]]}
        self.beat()
        return part.device

    def beat(self) -> None:
        """All are idle."""
        for holder in map(HolderId, HOLDERS):
            held = tuple(
                ev.HeldTicket(
                    e.id, e.model, types.Phase(e.state.value), 0, seconds(1),
                    tuple(types.DeviceBytes(d, b) for d, b in e.home.items()), e.need,
                )
                for e in self.driver.charged_tickets_of(holder)
            )  # fmt: skip
            self.feed(ev.Renewed(holder, held))

    def tickets(self, state: State) -> list[TicketId]:
        return [e.id for e in self.driver.tickets(state)]

    # -- what may happen -------------------------------------------------------------------------

    def load(self, model: str, pick: int) -> None:
        self.number += 1
        expected = naive(self.sizes[model], self.seen(model))
        granted = self.ask(TicketId(f"{model}{self.number}"), HOLDERS[pick % len(HOLDERS)])
        assert granted == expected

    def leave(self, _: str, pick: int) -> None:
        if residents := self.tickets(State.RESIDENT):
            ticket = residents[pick % len(residents)]
            self.feed(ev.Released(ticket, "idle"))
            del self.held[ticket]
            self.feed(ev.EngineGone(NODE, ticket, True))

    def to_sleep(self, model: str, _: int) -> None:
        """All its copies: host RAM will do, somebody says. Who refused lately is asked again."""
        self.now += REFUSAL_S
        for revoke in self.feed(ev.FloorSet("text", model, types.Floor.HOST)):
            self.held[revoke.ticket] = {HOST: self.sizes[model]}
            self.feed(ev.Slept(revoke.ticket))
            self.read()
        assert not any(t[0] == model for t in self.tickets(State.RESIDENT))

    def wake(self, _: str, pick: int) -> None:
        if asleep := self.tickets(State.ASLEEP):
            ticket_id = asleep[pick % len(asleep)]
            ticket = self.driver.find(ticket_id)
            [slept_on] = ticket.home
            there = next(row for row in self.seen(ticket_id[0]) if row.device == slept_on)
            fits = there.free_gib >= self.sizes[ticket_id[0]]
            assert self.ask(ticket_id, ticket.holder) == (slept_on if fits else None)


@pytest.mark.spec("C9")
@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(SIZES, STEPS)
def test_load_goes_where_an_exhaustive_search_places_it(
    sizes: dict[str, int], steps: list[tuple[str, str, int]]
) -> None:
    node = Node(sizes)
    for what, model, pick in steps:
        getattr(node, what)(model, pick)
    node.driver.audit()
