"""Units are whole numbers."""

from arbiter.units import (
    GIB,
    MIB,
    Bytes,
    Span,
    human,
    in_seconds,
    seconds,
)


def test_units_are_whole() -> None:
    assert seconds(1.5) == 1_500_000_000
    assert in_seconds(Span(250_000_000)) == 0.25
    assert (human(Bytes(GIB)), human(Bytes(-GIB)), human(Bytes(MIB))) == (
        "1.0 GiB", "-1.0 GiB", "1.0 MiB",
    )  # fmt: skip
