"""LineQueue: which line of all batches is next. Pure but for `read_lines`.

Lines are collated: a model keeps its turn while it has lines, over all batches, for `turn_s` at
most while another waits, and its adapters one after another. Within a turn the tenant with the
fewest lines in flight is next, then the batch that was made first. A *suspect*, a line under which
an engine has died (Suspects), goes behind the other lines of its group.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from deployments.jobs.batch_store import Batch, Line

AHEAD = 200  # lines of a group in memory: seconds of work, 30 kB

ReadLines = Callable[[str, str, str, int, int], list[Line]]  # as BatchStore.lines


@dataclass(slots=True, eq=False)
class Group:
    """The lines of one batch for one model or adapter."""

    batch: Batch
    model: str
    served: str
    ready: deque[Line] = field(default_factory=deque)
    suspects: deque[Line] = field(default_factory=deque)
    last: int = 0  # the highest number that was read
    is_read: bool = False  # all its lines were read; a batch that has begun gets no further lines

    def fill(self, read_lines: ReadLines) -> bool:
        """Reads further lines if all in memory are suspects. Returns whether it has a line now.
        Blocks."""
        while not self.ready and not self.is_read:
            lines = read_lines(self.batch.id, self.model, self.served, self.last, AHEAD)
            for line in lines:
                self.add(line)
            self.last = lines[-1].number if lines else self.last
            self.is_read = len(lines) < AHEAD
        return bool(self.ready or self.suspects)

    def add(self, line: Line) -> None:
        """Adds a line behind those of its kind."""
        (self.suspects if line.losses else self.ready).append(line)

    def next(self) -> Line:
        """Takes the next line."""
        return (self.ready or self.suspects).popleft()

    @property
    def is_over(self) -> bool:
        """Says whether all its lines were taken; one of them may still be put back."""
        return self.is_read and not self.ready and not self.suspects


class LineQueue:
    """The lines of all batches that run. `take`, `has_line` and `is_open` block while they read
    lines. All methods are called in one thread; properties may be read in another."""

    def __init__(self, read_lines: ReadLines, clock: Callable[[], float]) -> None:
        self._read_lines, self._clock = read_lines, clock
        self._groups: dict[str, list[Group]] = {}  # by batch
        self._not_before: dict[tuple[str, str], float] = {}  # by tenant and model
        self._in_flight: Counter[str] = Counter()  # by batch
        self._tenants: Counter[str] = Counter()
        self._model = self._served = ""
        self._turn_began_s = 0.0

    @property
    def batches(self) -> set[str]:
        return set(self._groups)

    def add(self, batch: Batch) -> None:
        self._groups[batch.id] = [Group(batch, model, served) for model, served in batch.models]

    def remove(self, batch_id: str) -> None:
        self._groups.pop(batch_id, None)

    def has_line(self, without: Collection[str]) -> bool:
        """Says whether there is a line now for another model than these. Blocks."""
        return bool(self._ready(self._clock(), without))

    def take(self, turn_s: float, without: Collection[str] = ()) -> tuple[Batch, Line] | None:
        """Returns the next line, which counts as in flight from now on; None: there is none now.
        `without`: models whose lines are passed over. Blocks."""
        now_s = self._clock()
        ready = self._ready(now_s, without)
        if not ready:
            return None
        self._give_turn({group.model: None for group in ready}, now_s, turn_s)
        of_model = [group for group in ready if group.model == self._model]
        group = min(of_model, key=self._rank)
        self._served = group.served
        self._in_flight[group.batch.id] += 1
        self._tenants[group.batch.tenant] += 1
        return group.batch, group.next()

    def _ready(self, now_s: float, without: Collection[str]) -> list[Group]:
        """Returns the groups that have a line now, for another model than these. Blocks."""
        for batch_id, groups in self._groups.items():
            self._groups[batch_id] = [group for group in groups if not group.is_over]
        return [
            group
            for groups in self._groups.values()
            for group in groups
            if group.model not in without
            and self._not_before.get(_key(group.batch, group.model), now_s) <= now_s
            and group.fill(self._read_lines)
        ]

    def _give_turn(self, models: dict[str, None], now_s: float, turn_s: float) -> None:
        """Gives the turn to the next of these models, if the turn of the present one is over."""
        is_over = now_s - self._turn_began_s >= turn_s and len(models) > 1
        if self._model in models and not is_over:
            return
        order = list(models)  # of their batches, and in a batch of their first lines
        at = order.index(self._model) if self._model in models else -1
        self._model = order[(at + 1) % len(order)]
        self._turn_began_s = now_s

    def _rank(self, group: Group) -> tuple[object, ...]:
        in_flight = self._tenants[group.batch.tenant]
        return in_flight, group.served != self._served, group.batch.created_s, group.batch.id

    def end(self, batch: Batch) -> None:
        """Notes that a line of the batch is in flight no more."""
        self._in_flight[batch.id] -= 1
        self._tenants[batch.tenant] -= 1

    def put_back(self, batch: Batch, line: Line, not_before_s: float) -> None:
        """Puts back a line that is to be tried again. Until `not_before_s` no line of this tenant
        goes to its model. Lines of other tenants go on, because a quota that is used up is the
        tenant's alone, and each tenant finds out by itself whether a model fails."""
        self._not_before[_key(batch, line.model)] = not_before_s
        if (groups := self._groups.get(batch.id)) is None:
            return
        wanted = line.model, line.served
        group = next((one for one in groups if (one.model, one.served) == wanted), None)
        if group is None:
            groups.append(group := Group(batch, *wanted, is_read=True))
        if line.losses:
            group.add(line)
        else:
            group.ready.appendleft(line)

    def is_open(self, batch_id: str) -> bool:
        """Says whether lines of the batch are in flight or to come, also for a blocked model.
        Blocks."""
        return self._in_flight[batch_id] > 0 or any(
            group.fill(self._read_lines) for group in self._groups[batch_id]
        )

    @property
    def due_s(self) -> float | None:
        """When the first blocked lines may be tried again."""
        now_s = self._clock()
        times = tuple(self._not_before.values())  # at once: the other thread may put a line back
        return min((s for s in times if s > now_s), default=None)


def _key(batch: Batch, model: str) -> tuple[str, str]:
    return batch.tenant, model
