"""What an engine's log has of requests that fail, through vLLM's own loggers."""

import io
import logging
from collections.abc import Iterator

import pytest
from vllm.logger import init_logger

from arbiter.errors import QueueFull
from deployments.engines.vllm.refusals_log import leave_out_refusals

logger = init_logger("vllm.entrypoints.openai.chat_completion.serving")


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger("vllm").addHandler(handler)
    yield stream
    logging.getLogger("vllm").removeHandler(handler)


def fail(error: Exception) -> None:
    try:
        raise error
    except type(error):
        logger.exception("Error in chat completion stream generator.")


def test_log_has_failures_with_their_tracebacks_and_no_refusals(written: io.StringIO) -> None:
    leave_out_refusals()
    fail(QueueFull("m", 2_000, 2_000, 1.0))
    assert written.getvalue() == ""
    fail(ZeroDivisionError("of this request"))
    assert "Traceback" in written.getvalue() and "of this request" in written.getvalue()
