"""Dataclasses as JSON-able values and back, exactly: what is read equals what was written. Fields
are typed, so only a union of dataclasses needs the class named; it is the caller's to write.

`arbiter.plain` is the other direction of care: for people, one way.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from arbiter.core.types import DeviceBytes
from arbiter.units import Span, in_seconds


def to_json(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple | list | frozenset):
        return [to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    return value


def from_json(kind: Any, value: Any) -> Any:
    """Raises TypeError, ValueError or KeyError for a value that is not of this kind."""
    kind = getattr(kind, "__supertype__", kind)  # NewType
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return _optional(kind, value)
    if origin in (tuple, list, frozenset):
        return origin(from_json(get_args(kind)[0], item) for item in value)
    if origin in (dict, Mapping):
        return {key: from_json(get_args(kind)[1], item) for key, item in value.items()}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if isinstance(kind, type) and is_dataclass(kind):
        return kind(**{name: from_json(_hints(kind)[name], item) for name, item in value.items()})
    return value


def _optional(kind: Any, value: Any) -> Any:
    if value is None:
        return None
    [only] = [k for k in get_args(kind) if k is not NoneType]
    return from_json(only, value)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


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
