"""Every error a client can get has OpenAI's form and the right status."""

import json

import pytest

from arbiter import errors
from arbiter.errors import RequestError
from arbiter.units import Bytes, TicketId
from deployments import messages

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
