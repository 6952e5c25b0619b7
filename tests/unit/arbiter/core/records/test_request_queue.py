"""The queue keeps the order of the policy."""

from hypothesis import given
from hypothesis import strategies as st

from arbiter.core.records.request_queue import RequestQueue
from arbiter.units import (
    Instant,
    NodeId,
    TicketId,
)
from policies import admit_fifo


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
