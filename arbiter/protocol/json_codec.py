"""Dataclasses as JSON-able values: exactly and back (`to_json`, `from_json`), and for people, one
way (`plain`).
"""

from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, get_args

import msgspec

from arbiter.core.types import DeviceBytes
from arbiter.units import Span, in_seconds


def to_json(value: Any) -> Any:
    """Returns a JSON value with the fields of the dataclasses. What `from_json` reads equals what
    was written; only a union of dataclasses needs the class named, which is the caller's to
    write."""
    return msgspec.to_builtins(value)


def from_json(kind: Any, value: Any) -> Any:
    """Returns the dataclass that a JSON value describes. Raises ValueError, naming the field, for a
    value that is not of this kind."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


# -------------------------------------------------------------------------------------------------
# Dataclasses as JSON-able values, for people and other programs: a Span becomes seconds with `_s`
# at the end of its name, bytes per device an object `<name>_bytes`.


def plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return dict(_field(f.name, f.type, getattr(value, f.name)) for f in fields(value))
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def _field(name: str, kind: Any, value: Any) -> tuple[str, Any]:
    if kind is Span or Span in get_args(kind):
        return f"{name}_s", None if value is None else in_seconds(value)
    if DeviceBytes in get_args(kind):
        return f"{name}_bytes", {d.device: int(d.size_bytes) for d in value}
    return name, plain(value)
