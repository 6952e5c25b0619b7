"""Events out of the pieces of a stream."""

import time

import pytest

from deployments.jobs.sse import Events

STREAM = b": waiting\n\ndata: a\n\ndata: b\r\n\r\ndata: c\ndata: d\r\n\n\n\ndata: e"


@pytest.mark.spec("J4")
@pytest.mark.parametrize("size", range(1, len(STREAM)))
def test_events_are_the_same_however_their_bytes_were_cut(size: int) -> None:
    events = Events()
    pieces = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    found = [event for piece in pieces for event in events.feed(piece)]
    assert [event.strip() for event in found] == ["data: a", "data: b", "data: c\ndata: d"]
    assert events.feed(b"\n\n") == ["data: e"]


@pytest.mark.spec("J4")
def test_event_with_a_picture_is_searched_once() -> None:
    piece, events = b"A" * (8 << 10), Events()
    began_s = time.thread_time()
    for _ in range(512):
        assert events.feed(piece) == []
    [event] = events.feed(b"\n\n")
    assert len(event) == 4 << 20
    assert time.thread_time() - began_s < 5.0  # half a minute, where all is searched at each piece
