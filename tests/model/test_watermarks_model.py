"""Host RAM under any coming and going of sleepers (C4), judged by an onlooker who adds up what
stays: nobody goes between the marks, nobody goes beyond the low one, and above the high one stays
only who may not go."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import KillEngine, Reason
from arbiter.core.records.ticket import LEAVING, State, Ticket
from arbiter.units import HolderId, TicketId, seconds
from tests.support.core_driver import CPU, HOST, NODE, CoreDriver, gib
from tests.support.examples import examples

HIGH, LOW = gib(90), gib(80)
FLOORED = "c"
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["sleeper", "sleeper", "sleeper", "gone", "others", "wanted"]),
        st.integers(0, 30), st.sampled_from("abc"),
    ),
    max_size=40,
)  # fmt: skip


class Host:
    def __init__(self) -> None:
        self.driver, self.now, self.number = CoreDriver(device=10, host=100), 0.0, 0
        self.feed(ev.FloorSet("text", FLOORED, types.Floor.HOST))
        self.driver.resident(1, "large", 10)  # in use, so that a sleeper which is wanted waits
        self.driver.beat(1, "large", inflight=1)

    def feed(self, event: ev.Event) -> None:
        self.now += 1
        before = {e.id for e in self.driver.tickets(State.RECLAIMING)}
        out = self.driver.at(self.now, event)
        self.judge([d.ticket for d in out if isinstance(d, KillEngine) and d.ticket not in before])

    def judge(self, killed: list[TicketId]) -> None:
        book = self.driver.account(HOST)
        going = [e for e in book.tickets.values() if e.state in LEAVING and not e.reclaim_late]
        stays = book.budget_bytes - book.free_bytes - sum(e.charge(HOST) for e in going)
        fell = [e for e in going if e.id in killed and e.leaving is Reason.FIT]
        before = stays + sum(e.charge(HOST) for e in fell)
        if fell:
            assert before > HIGH, "nothing had to go"
            last = next(e for e in fell if e.id == killed[-1])
            assert stays + last.charge(HOST) > LOW, "the last of them went for nothing"
            assert not any(self.must_stay(e) for e in fell)
        is_over = before > book.budget_bytes  # then it is made to fit first: between the marks
        if stays > (LOW if fell and not is_over else HIGH):
            sleepers = self.driver.tickets(State.ASLEEP)
            newest = max(sleepers, key=lambda e: (e.since, e.id), default=None)
            assert all(e is newest or self.must_stay(e) for e in sleepers)

    def must_stay(self, ticket: Ticket) -> bool:
        return ticket.model == FLOORED or ticket.id in self.driver.queue()

    def one(self, state: State, pick: int) -> Ticket | None:
        tickets = self.driver.tickets(state)
        return tickets[pick % len(tickets)] if tickets else None

    # -- what may happen -------------------------------------------------------------------------

    def sleeper(self, size: int, model: str) -> None:
        """A holder comes back with it: however much there is already."""
        self.number += 1
        need = types.Need(gib(1), host_bytes=gib(size))
        at = (types.DeviceBytes(CPU, gib(1)),)
        held = ev.HeldTicket(
            TicketId(f"{model}{self.number}"), model, types.Phase.ASLEEP, 0, seconds(1), at, need
        )
        self.feed(ev.Joined(HolderId(f"h{self.number}"), NODE, "text", (held,)))

    def gone(self, pick: int, _: str) -> None:
        if ticket := self.one(State.RECLAIMING, pick) or self.one(State.ASLEEP, pick):
            self.feed(ev.Released(ticket.id, "idle"))
            self.feed(ev.EngineGone(NODE, ticket.id, True))

    def others(self, size: int, _: str) -> None:
        """Memory without a ticket: no watermark makes it go."""
        self.driver.foreign[HOST] = size
        devices = tuple(
            ev.DeviceReading(d, gib(1e6), gib(self.driver.foreign.get(d, 0))) for d in (CPU, HOST)
        )
        self.feed(ev.Measured(NODE, devices, ()))

    def wanted(self, pick: int, _: str) -> None:
        if e := self.one(State.ASLEEP, pick):
            self.feed(ev.Requested(e.id, e.holder, "text", e.model, e.need, "", True))


@pytest.mark.spec("C4")
@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(STEPS)
def test_asleep_models_are_evicted_only_above_the_high_mark_and_down_to_the_low(
    steps: list[tuple[str, int, str]],
) -> None:
    host = Host()
    for what, size, model in steps:
        getattr(host, what)(size, model)
