"""Events are read as they were written."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arbiter.protocol.json_codec import from_json, to_json
from arbiter.server.recording import (
    EVENTS,
)
from tests.support.examples import examples

NAN = re.compile(r"\bnan\b")


@pytest.mark.parametrize("kind", EVENTS.values(), ids=EVENTS)
@settings(max_examples=examples(15))  # of each of twenty kinds
@given(data=st.data())
def test_every_event_is_read_as_it_was_written(kind: Any, data: st.DataObject) -> None:
    # A NaN equals nothing, itself included.
    event = data.draw(st.from_type(kind).filter(lambda drawn: not NAN.search(repr(drawn))))
    assert from_json(kind, json.loads(json.dumps(to_json(event)))) == event
