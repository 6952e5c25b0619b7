"""Keeps the compactions under way, and what calls for the next (D7)."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from arbiter.core.decisions import Compacted, SparedModel
from arbiter.core.types import ModelName
from arbiter.units import Bytes, DeviceId, HolderId, TicketId


@dataclass(frozen=True, slots=True)
class CompactedTicket:
    """Describes one model that is freed to be loaded again."""

    ticket: TicketId  # of the process that goes
    holder: HolderId
    name: ModelName
    wasted_bytes: Bytes


@dataclass(slots=True)
class Compaction:
    """Describes one compaction. Its models are freed one at a time, unless a queued ticket waits
    for the bytes of all, and loaded again one at a time."""

    request: str
    asker: TicketId | None = None  # the queued ticket for which room is made
    waiting: list[TicketId] = field(default_factory=list)  # to be freed
    freeing: dict[TicketId, CompactedTicket] = field(default_factory=dict)
    freed: list[CompactedTicket] = field(default_factory=list)  # to be loaded again
    loading: CompactedTicket | None = None
    freed_count: int = 0
    freed_bytes: Bytes = Bytes(0)
    spared: list[SparedModel] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        """Says whether nothing is left to be freed or loaded."""
        return not (self.waiting or self.freeing or self.freed or self.loading)

    def take_waiting(self, tickets: Iterable[TicketId]) -> None:
        """Adds tickets that are to be freed."""
        self.waiting += tickets

    def next_to_free(self) -> TicketId:
        """Takes the first of the tickets that are to be freed."""
        return self.waiting.pop(0)

    def next_to_load(self) -> CompactedTicket:
        """Takes the first of the models that are to be loaded again."""
        return self.freed.pop(0)

    def spare(self, model: str, ticket_id: TicketId | None, why: str) -> None:
        """Notes that a model is left as it is."""
        if ticket_id is not None:
            self.freeing.pop(ticket_id, None)
        self.spared.append(SparedModel(model, ticket_id, why))

    def begin_freeing(self, item: CompactedTicket) -> None:
        """Notes that the holder of a model was asked to let go of it."""
        self.freeing[item.ticket] = item

    def end_freeing(self, item: CompactedTicket) -> None:
        """Counts a model whose bytes were seen back, and has it loaded again."""
        del self.freeing[item.ticket]
        self.freed.append(item)
        self.freed_count += 1
        self.freed_bytes = Bytes(self.freed_bytes + item.wasted_bytes)

    def begin_load(self, item: CompactedTicket) -> None:
        """Notes that the holder of a model was asked to load it again."""
        self.loading = item

    def end_load(self) -> None:
        """Notes that the model has been loaded again, or will not be."""
        self.loading = None

    def answer(self) -> Compacted:
        """Returns what came of it so far."""
        spared = tuple(self.spared)
        return Compacted(
            self.request, self.freed_count, self.freed_bytes, spared, is_finished=self.has_ended
        )


@dataclass(slots=True)
class Compactions:
    """Keeps the compactions under way by request, the tickets that were seen to hold enough beyond
    their need, and the loads of each device since the last compaction there."""

    runs: dict[str, Compaction] = field(default_factory=dict)
    wasteful: dict[TicketId, None] = field(default_factory=dict)
    loads_count: Counter[DeviceId] = field(default_factory=Counter)

    def begin(self, run: Compaction) -> None:
        """Adds a compaction; none of its request is under way."""
        assert run.request not in self.runs
        self.runs[run.request] = run

    def begin_for(self, asker: TicketId) -> Compaction:
        """Returns the compaction that makes room for a queued ticket, begun now unless it was."""
        name = f"for {asker}"
        if name not in self.runs:
            self.begin(Compaction(name, asker=asker))
        return self.runs[name]

    def end(self, run: Compaction) -> None:
        """Forgets a compaction that has ended."""
        del self.runs[run.request]

    def take_devices_due(self, every_count: int) -> list[DeviceId]:
        """Returns the devices of so many loads, which are counted from zero again."""
        due = [device for device, count in self.loads_count.items() if count >= every_count]
        for device in due:
            del self.loads_count[device]
        return due

    def count_load(self, devices: Iterable[DeviceId]) -> None:
        """Counts a load on each of its devices."""
        self.loads_count.update(list(devices))

    def forget_device(self, device: DeviceId) -> None:
        """Forgets the loads of a device that has left."""
        self.loads_count.pop(device, None)

    def note_waste(self, ticket_id: TicketId, *, is_enough: bool) -> None:
        """Notes whether a ticket holds enough beyond its need."""
        if is_enough:
            self.wasteful[ticket_id] = None
        else:
            self.wasteful.pop(ticket_id, None)

    def is_loading(self, name: ModelName) -> bool:
        """Says whether a model is being loaded again."""
        runs = self.runs.values()
        return any(run.loading is not None and run.loading.name == name for run in runs)
