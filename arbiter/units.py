"""Types that carry units, and names that all layers use. Every size is an int of bytes, every time
an int of nanoseconds."""

import operator
from collections.abc import Callable
from enum import StrEnum
from typing import NewType

Bytes = NewType("Bytes", int)
Instant = NewType("Instant", int)  # ns on one host's monotonic clock; never crosses a process
Span = NewType("Span", int)  # ns between two Instants; may cross a process border

TicketId = NewType("TicketId", str)  # idempotency key, chosen by the holder
HolderId = NewType("HolderId", str)
NodeId = NewType("NodeId", str)
DeviceId = NewType("DeviceId", str)  # "<node>/cpu:0", "<node>/host", "<node>/gpu:3"
Epoch = NewType("Epoch", int)  # one life of the arbiter; strictly increasing across restarts
Generation = NewType("Generation", int)  # of what a person set; counts every change


DEFAULT_TENANT = "default"  # of every caller without an API key
# The longest time that a person or a client may name: a leap year. What is lawful of it the
# settings say; beyond 292 years nanoseconds do not fit.
LONGEST_S = 31_622_400.0


class Content(StrEnum):
    """Names what the rows of a slab are (E1). Idle slabs leave in this order (E4)."""

    TEMPORARY = "temporary"
    PICTURE = "picture"
    ADAPTER = "adapter"
    WEIGHTS = "weights"
    KV = "kv"

    @property
    def rank(self) -> int:
        """Returns its place in that order, from 0."""
        return list(Content).index(self)


def host_device(node: NodeId) -> DeviceId:
    """Returns the device of a node on which its sleeping models are charged."""
    return DeviceId(f"{node}/host")


KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
MILLISECOND = Span(1_000_000)
SECOND = Span(1_000_000_000)


# Returns the instant a span after another, on the same clock. The sum of C, because one decision of
# the core makes eighty, and a function of Python around it takes three times as long.
after: Callable[[Instant, Span], Instant] = operator.add


def since(start: Instant, now: Instant) -> Span:
    """Returns the span from one instant to another; negative where `now` comes first."""
    return Span(now - start)


def seconds(value: float) -> Span:
    """Returns the span of so many seconds, rounded to a nanosecond."""
    return Span(round(value * SECOND))


def in_seconds(span: Span) -> float:
    """Returns how many seconds a span has."""
    return span / SECOND


def human(size: Bytes) -> str:
    """Returns bytes as the field writes them: binary units, one decimal."""
    return f"{size / GIB:.1f} GiB" if abs(size) >= GIB else f"{size / MIB:.1f} MiB"
