"""The queue keeps the order of the policy."""

from hypothesis import given
from hypothesis import strategies as st

from arbiter.core.records.request_queue import RequestQueue
from arbiter.core.records.timers import NEVER
from arbiter.core.types import ModelName
from arbiter.units import (
    Bytes,
    Instant,
    NodeId,
    Span,
    TicketId,
)
from policies import admit_fifo

MODEL = ModelName("text", "m")


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=30))
def test_queue_keeps_the_order_of_the_policy_whatever_leaves(steps: list[tuple[int, bool]]) -> None:
    line, model, now = RequestQueue(admit_fifo.key), [], 0
    for number, leaves in steps:
        now += number
        if leaves and model:
            line.drop(model.pop(number % len(model)))
        else:
            ticket = TicketId(f"t{len(model)}-{now}-{number}-{line._sequence}")
            line.add(ticket, "m", NodeId("n"), Instant(now))
            model.append(ticket)
        assert line.tickets() == model
        assert line.count("m") == len(line) == len(model)


def test_queue_walk_meets_tickets_queued_at_its_start_that_have_not_left() -> None:
    line, node = RequestQueue(admit_fifo.key), NodeId("n")
    for number, ticket in enumerate("abcd"):
        line.add(TicketId(ticket), "m", node, Instant(number))
    walk = line.walk(node)
    met = [next(walk).request.ticket]
    line.drop(TicketId("c"))
    line.add(TicketId("e"), "m", node, Instant(9))
    for waiting in walk:  # one moves ahead of who walks
        line.age(waiting)
        met.append(waiting.request.ticket)
        assert [w.request.ticket for w in line.walk(node)][-1] == "e"
    assert met == ["a", "b", "d"]
    assert [w.request.ticket for w in line.at(node)] == ["b", "d", "a", "e"]


def test_queue_counts_the_tickets_that_have_a_deadline() -> None:
    line, node = RequestQueue(admit_fifo.key), NodeId("n")
    for ticket, deadline in (("a", 10), ("b", 20), ("c", None)):
        until = None if deadline is None else Instant(deadline)
        line.add(TicketId(ticket), MODEL, node, Instant(0), until)
    assert line.stats(node).deadlines_count == 2
    line.extend_deadline(TicketId("a"), Instant(15))
    line.extend_deadline(TicketId("c"), Instant(15))  # which waits longer already
    assert line.stats(node).deadlines_count == 2
    line.extend_deadline(TicketId("a"), None)
    assert line.stats(node).deadlines_count == 1
    line.drop(TicketId("b"))
    assert line.stats(node).deadlines_count == 0


def test_queue_knows_which_ticket_must_have_room_soonest() -> None:
    line, node = RequestQueue(admit_fifo.key), NodeId("n")
    for ticket, deadline in (("a", 10), ("b", 20), ("c", None)):
        until = None if deadline is None else Instant(deadline)
        waiting = line.add(TicketId(ticket), MODEL, node, Instant(0), until)
        waiting.note_lead(Span(3))
        line.stats(node).know(waiting, Bytes(1), 0)
    assert line.stats(node).soonest == 7
    line.drop(TicketId("a"))
    line.weigh(node)
    assert line.stats(node).soonest == 17
    line.drop(TicketId("b"))
    line.weigh(node)
    assert line.stats(node).soonest == NEVER
