"""What a node's pool has done with each content, also in slabs that have left (E7)."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict

from arbiter.core.events import ContentReading
from arbiter.pool import Counts, SlabView
from arbiter.units import Bytes, Content, Span


class ContentTotals:
    """Adds up the counts of slabs by content."""

    def __init__(self) -> None:
        self._left: defaultdict[Content, Counter[str]] = defaultdict(Counter)
        self._saves: Counter[Content] = Counter()

    def note_left(self, content: Content, counts: Counts, *, was_saved: bool) -> None:
        """Keeps what a slab that leaves has counted, without the rows that it has."""
        self._left[content] += Counter(asdict(counts) | {"ready_count": 0})
        self._saves[content] += was_saved

    def readings(self, slabs: Iterable[tuple[Content, SlabView]]) -> tuple[ContentReading, ...]:
        """Returns a reading of each content, in their order, without contents that never had a
        slab."""
        totals = {content: Counter(counts) for content, counts in self._left.items()}
        taken: Counter[Content] = Counter()
        for content, view in slabs:
            totals.setdefault(content, Counter()).update(asdict(view.counts))
            taken[content] += view.allocated_bytes
        return tuple(
            _reading(content, totals[content], Bytes(taken[content]), self._saves[content])
            for content in Content
            if content in totals
        )


def _reading(
    content: Content, counts: Counter[str], taken: Bytes, saves_count: int
) -> ContentReading:
    return ContentReading(
        content,
        taken,
        rows_count=counts["ready_count"],
        hits_count=counts["hits_count"],
        misses_count=counts["misses_count"],
        stored_count=counts["stored_count"],
        evicted_count=counts["evicted_count"],
        refused_count=counts["refused_count"],
        restored_count=counts["restored_count"],
        saves_count=saves_count,
        load=Span(counts["load_ns"]),
        restore=Span(counts["restore_ns"]),
        hot_hits_count=counts["hot_hits_count"],
    )
