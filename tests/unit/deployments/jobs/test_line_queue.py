"""LineQueue: which line is next."""

import pytest

from deployments.jobs.batch_store import Batch, BatchState, Line
from deployments.jobs.line_queue import LineQueue

TURN_S = 300.0


class Lines:
    """A queue over lines in memory, with a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.lines: dict[str, list[Line]] = {}
        self.reads_count = 0
        self.queue = LineQueue(self._more, lambda: self.now_s)

    def _more(self, batch: str, model: str, served: str, after: int, limit: int) -> list[Line]:
        self.reads_count += 1
        mine = [
            line
            for line in self.lines[batch]
            if (line.model, line.served) == (model, served) and line.number > after
        ]
        return mine[:limit]

    def add(self, batch_id: str, served: str, tenant: str = "t") -> Batch:
        """`served` has a word for each line: a model, or `model:adapter`."""
        words = served.split()
        self.lines[batch_id] = [
            Line(n, 0, 1, word.partition(":")[0], word) for n, word in enumerate(words, 1)
        ]
        models = dict.fromkeys((word.partition(":")[0], word) for word in words)
        made = Batch(
            *(batch_id, tenant, "/v1/x", "file-in", "24h", None, 0.0, BatchState.IN_PROGRESS, ()),
            *(len(words), 0, 0, {}, tuple(models), "", "file-o", "file-e", 0, 0),
            *(float(len(self.lines)), 1e9, {}),
        )
        self.queue.add(made)
        return made

    def take(self) -> tuple[Batch, Line] | None:
        return self.queue.take(TURN_S)

    def order(self) -> list[str]:
        """All that can be taken now, each ended before the next."""
        found = []
        while taken := self.take():
            batch, line = taken
            found.append(line.served)
            self.queue.end(batch)
        return found


@pytest.fixture
def queue() -> Lines:
    return Lines()


@pytest.mark.spec("J4", "C13")
def test_lines_of_a_model_go_together_over_batches_and_its_adapters_one_after_another(
    queue: Lines,
) -> None:
    queue.add("a", "one:x two one one:x one")
    queue.add("b", "two one:x")
    assert queue.order() == ["one:x", "one:x", "one:x", "one", "one", "two", "two"]


@pytest.mark.spec("J4", "C13")
def test_turn_ends_after_its_time_while_another_model_waits(queue: Lines) -> None:
    queue.add("a", "one one one two two")
    taken = []
    for now_s in (0, TURN_S - 1, TURN_S, 2 * TURN_S, 2 * TURN_S):
        queue.now_s = now_s
        found = queue.take()
        assert found is not None
        taken.append(found[1].served)
    assert taken == ["one", "one", "two", "one", "two"]


@pytest.mark.spec("J4", "C10")
def test_tenant_with_fewer_lines_in_flight_is_next(queue: Lines) -> None:
    queue.add("a", "one " * 6, "large")
    queue.add("b", "one " * 2, "small")
    found = [queue.take() for _ in range(6)]
    tenants = [batch.tenant for batch, _ in filter(None, found)]
    assert tenants == ["large", "small", "large", "small", "large", "large"]


@pytest.mark.spec("J4")
def test_model_that_refused_waits_while_others_run(queue: Lines) -> None:
    queue.add("a", "one one two")
    taken = queue.take()
    assert taken is not None
    queue.queue.put_back(*taken, 10.0)
    queue.queue.end(taken[0])
    assert queue.order() == ["two"]
    assert queue.queue.due_s == 10.0 and queue.queue.is_open("a")
    queue.now_s = 10.0
    assert queue.order() == ["one", "one"]
    assert not queue.queue.is_open("a")


@pytest.mark.spec("J4", "C10")
def test_lines_of_another_tenant_go_on_where_one_was_refused(queue: Lines) -> None:
    queue.add("a", "one one", tenant="spent")
    taken = queue.take()
    assert taken is not None
    queue.queue.put_back(*taken, 10.0)
    queue.queue.end(taken[0])
    queue.add("b", "one one one", tenant="other")
    assert len(queue.order()) == 3
    assert queue.queue.is_open("a") and not queue.queue.is_open("b")


@pytest.mark.spec("J4")
def test_lines_are_read_as_they_are_needed(queue: Lines) -> None:
    queue.add("a", "one " * 1_000)
    assert len(queue.order()) == 1_000
    assert [line.number for line in queue.lines["a"]] == list(range(1, 1_001))
    queue.queue.remove("a")
    assert queue.take() is None


@pytest.mark.spec("J4")
def test_line_costs_no_look_at_the_adapters_whose_lines_were_taken(queue: Lines) -> None:
    served = [f"one:{number}" for number in range(1_000)]
    queue.add("a", " ".join(served))
    assert queue.order() == served
    assert not queue.queue.is_open("a")
    assert queue.reads_count <= 2 * len(served)


@pytest.mark.spec("J4")
def test_line_is_put_back_although_all_of_its_adapter_were_taken(queue: Lines) -> None:
    queue.add("a", "one:x two")
    taken = queue.take()
    assert taken is not None
    assert queue.order() == ["two"]
    queue.queue.put_back(*taken, 0.0)
    queue.queue.end(taken[0])
    assert queue.queue.is_open("a")
    assert queue.order() == ["one:x"]
    assert not queue.queue.is_open("a")
    queue.queue.remove("a")
    queue.queue.put_back(*taken, 0.0)
    assert queue.take() is None


def test_the_time_of_the_next_try_is_read_while_another_line_is_put_back(queue: Lines) -> None:
    """As by another thread, between two steps of the reader's loop."""
    first, second = queue.add("a", "one"), queue.add("b", "one", "u")
    assert queue.take() and queue.take()

    class Read(float):
        def __gt__(self, other: object) -> bool:
            queue.queue.put_back(second, Line(1, 0, 1, "one", "one"), 20.0)
            return True

    queue.queue.put_back(first, Line(1, 0, 1, "one", "one"), Read(10.0))
    assert queue.queue.due_s == 10.0
