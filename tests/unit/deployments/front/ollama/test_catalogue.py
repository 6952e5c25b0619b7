"""What Ollama's clients are told of the models that are loaded."""

from datetime import UTC, datetime
from typing import Any

import pytest
from ollama import ProcessResponse

from arbiter.core.decisions import Reason
from arbiter.units import seconds
from deployments.config.schema import parse_table
from deployments.front.ollama import catalogue
from tests.support.arbiter_states import Books

pytestmark = pytest.mark.spec("J1")
TABLE = parse_table(
    {"capabilities": {"chat": {"role": "text", "engine": "vllm", "models": {"m": {"source": "x"}}}}}
)
FOR_EVER_S = 100 * 365 * 86_400  # far beyond any time that a client can ask for


def stays_s(**ticket: Any) -> float:
    """Seconds from now until `expires_at`, as the client reads it."""
    books = Books()
    books.holds("m", 100, **ticket)
    rows = catalogue.rows(TABLE, books.state(), {"m": 512})
    [row] = ProcessResponse.model_validate({"models": rows}).models
    assert row.expires_at is not None
    return (row.expires_at - datetime.now(UTC)).total_seconds()


@pytest.mark.parametrize(
    ("ticket", "left_s"),
    [
        ({"idle_s": 20.0}, 280),
        ({"idle_s": 400.0}, 0),
        ({"idle_s": 0.0, "stay_warm": seconds(1_800.0)}, 2_100),
        ({"inflight": 1, "stay_warm": seconds(60.0)}, 360),
        ({"state": "draining", "leaving": Reason.SWAP.value, "stay_warm": seconds(60.0)}, 0),
    ],
)
def test_model_expires_after_its_keep_alive_and_its_keep_warm(
    ticket: dict[str, Any], left_s: float
) -> None:
    assert stays_s(**ticket) == pytest.approx(left_s, abs=60)


@pytest.mark.parametrize("ticket", [{"keep_warm": seconds(-1)}, {"pinned": True}])
def test_model_that_never_goes_by_itself_expires_in_a_century(ticket: dict[str, Any]) -> None:
    assert stays_s(**ticket) > FOR_EVER_S
