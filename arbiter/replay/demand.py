"""Who wants which model when, and what bringing it in takes."""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from arbiter.core.events import CapabilitiesSet, NodeSeen
from arbiter.core.types import Need, Priority
from arbiter.units import Instant, NodeId, Span


@dataclass(frozen=True, slots=True)
class Seat:
    """Names one model at one replica of its capability on one node: what can be resident or not."""

    capability: str
    model: str
    node: NodeId
    need: Need
    load: Span  # from the grant to the first use, from disk
    wake: Span = Span(0)  # the same from host RAM; counts only where need.host_bytes is above 0
    sleep: Span = Span(0)  # from nothing in flight to weights in host RAM
    priority: Priority = Priority.NORMAL  # of its requests
    unload: Span = Span(0)  # from nothing in flight until its bytes are seen back


@dataclass(frozen=True, slots=True)
class Use:
    """Describes one request: it comes, and keeps its model in use for a while."""

    at: Instant
    position: int  # of its seat in Demand.seats
    busy: Span


class PackedRequests:
    """Holds requests in order of time, packed: a million take 24 MB."""

    def __init__(self, uses: Iterable[Use]) -> None:
        self._at, self._seat, self._busy = array("q"), array("q"), array("q")
        for use in sorted(uses, key=lambda use: use.at):
            self._at.append(use.at)
            self._seat.append(use.position)
            self._busy.append(use.busy)

    def __len__(self) -> int:
        return len(self._at)

    def __iter__(self) -> Iterator[tuple[Instant, int, Span]]:
        for at, seat, busy in zip(self._at, self._seat, self._busy, strict=True):
            yield Instant(at), seat, Span(busy)

    @property
    def end(self) -> Instant:
        """Returns the instant of the last request; 0 when there is none."""
        return Instant(self._at[-1] if self._at else 0)


@dataclass(frozen=True, slots=True)
class Demand:
    """Holds everything a replay needs besides settings and policies."""

    nodes: tuple[NodeSeen, ...]
    table: CapabilitiesSet
    seats: tuple[Seat, ...]
    uses: PackedRequests

    def wanted(self) -> "dict[tuple[str, str], array[int]]":
        """Returns when each model of a capability is asked for, at any of its seats."""
        names = [(seat.capability, seat.model) for seat in self.seats]
        times: dict[tuple[str, str], array[int]] = {name: array("q") for name in names}
        for at, seat, _ in self.uses:
            times[names[seat]].append(at)
        return times
