"""Keeps refused requests out of vLLM's log.

vLLM notes each exception of a stream with its traceback, some 50 lines. A refusal, as of a full
queue, is none of its failures: the client is told, and in a flood the log would have nothing else.
"""

import logging

from arbiter.errors import RequestError


def leave_out_refusals() -> None:
    """Filters what vLLM's handlers write: a filter of its logger would see no record of others
    beneath it."""
    for handler in logging.getLogger("vllm").handlers:
        handler.addFilter(_is_no_refusal)


def _is_no_refusal(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, RequestError)
