"""Every error a client can get has OpenAI's form and the right status."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arbiter import errors
from arbiter.errors import RequestError
from arbiter.units import Bytes, TicketId
from deployments import messages
from tests.support.examples import examples

CASES: list[tuple[RequestError, int, str]] = [
    (errors.UnknownModel("a", "", ("b",)), 404, "invalid_request_error"),
    (errors.QueueFull("a", 5, 5, 2.0), 429, "rate_limit_error"),
    (errors.ModelCoolingDown("a", "no file", 3.2), 503, "server_error"),
    (errors.NeverFits(TicketId("t"), Bytes(9), Bytes(8)), 507, "server_error"),
    (errors.ArbiterUnavailable(1.0), 503, "server_error"),
]


@pytest.mark.spec("L3", "J1")
@pytest.mark.parametrize(("error", "status", "kind"), CASES, ids=lambda c: type(c).__name__)
def test_an_error_becomes_openais_object(error: RequestError, status: int, kind: str) -> None:
    head, body = messages.refusal(error)
    assert head.status == status
    answer = json.loads(body)["error"]
    assert answer["type"] == kind
    assert answer["code"] == error.code
    assert answer["message"] == str(error)


def test_temporary_refusal_has_retry_after() -> None:
    head, _ = messages.refusal(errors.ModelCoolingDown("a", "no file", 3.2))
    assert head.headers["retry-after"] == "3"


def test_permanent_refusal_has_no_retry_after() -> None:
    head, _ = messages.refusal(errors.UnknownModel("a", "", ()))
    assert "retry-after" not in head.headers


def test_an_unknown_model_names_the_field() -> None:
    _, body = messages.refusal(errors.UnknownModel("a", "", ("b",)))
    assert json.loads(body)["error"]["param"] == "model"


def test_only_a_lost_engine_is_worth_sending_again_at_once() -> None:
    assert messages.is_transient(errors.EngineLost("a", TicketId("t")))
    assert not any(messages.is_transient(error) for error, _, _ in CASES)


EVENT_ENDS = st.sampled_from(["\n\n", "\r\n\r\n", "\r\r"])
EVENTS = st.lists(st.tuples(st.sampled_from(["data: 1", ": a", "event: b\ndata: 2"]), EVENT_ENDS))


@pytest.mark.spec("J1")
@settings(max_examples=examples(200))
@given(EVENTS, st.lists(st.integers(0, 80)))
def test_only_whole_events_go_out_however_their_stream_is_cut(
    events: list[tuple[str, str]], cuts: list[int]
) -> None:
    texts = [(text + end).encode() for text, end in events]
    stream, held = b"".join(texts), messages.WholeEvents()
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    sent, ends = b"", [len(b"".join(texts[:count])) for count in range(len(texts) + 1)]
    for start, end in pairwise(places):
        sent += held.whole(stream[start:end])
        assert stream.startswith(sent) and len(sent) == max(e for e in ends if e <= end)
    assert sent == stream and held.rest() == b""


@pytest.mark.spec("J1")
def test_stream_that_ends_well_without_a_blank_line_is_sent_to_its_end() -> None:
    held = messages.WholeEvents()
    assert held.whole(b"data: 1\n\ndata: 2\n") == b"data: 1\n\n"
    assert held.rest() == b"data: 2\n"


@pytest.mark.spec("L3")
def test_event_that_does_not_end_is_held_within_a_bound() -> None:
    held, piece = messages.WholeEvents(), bytes(messages.MOST_HELD_BYTES // 2)
    assert held.whole(piece) == held.whole(piece) == b""
    assert held.whole(b"x") == 2 * piece + b"x" and held.rest() == b""
