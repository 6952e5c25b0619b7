"""The handshake compares a hash that changes with every message and every part of one."""

from collections.abc import Iterator
from dataclasses import field, is_dataclass, make_dataclass
from types import ModuleType
from typing import Any

import pytest

from arbiter.core import events, settings, types, view
from arbiter.protocol import messages

MODULES = (types, events, settings, view, messages)
ADDED = ("added", int, field(default=0, kw_only=True))


def dataclasses_of(module: ModuleType) -> Iterator[type]:
    for value in vars(module).values():
        if isinstance(value, type) and is_dataclass(value):
            yield value


KINDS = sorted({k for m in MODULES for k in dataclasses_of(m)}, key=lambda kind: kind.__name__)


@pytest.mark.spec("A20")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_field_more_in_any_message_changes_the_protocol_hash(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, is_frozen = messages.protocol_hash(), kind.__dataclass_params__.frozen
    longer = make_dataclass(kind.__name__, [ADDED], bases=(kind,), frozen=is_frozen)
    for module in MODULES:
        for name, value in tuple(vars(module).items()):
            if value is kind:
                monkeypatch.setattr(module, name, longer)
    assert messages.protocol_hash() != before


def test_the_protocol_hash_covers_what_crosses_and_what_is_stored() -> None:
    names = {kind.__name__ for kind in messages.messages()}
    expected = {"Requested", "Granted", "Measured", "RevokeCommand", "SpawnSpec", "ModelSpec"}
    assert expected <= names
