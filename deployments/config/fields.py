"""What configuration and bodies are made of: sizes as people write them, and models that refuse
what they do not know."""

import re
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from arbiter.units import GIB, KIB, MIB

_UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(" + "|".join(_UNITS) + r")")


_MOST_BYTES = 1 << 60  # an exbibyte: a million of the largest nodes; floats hold it with ease


def parse_size(value: object) -> int:
    """Bytes from an int or from text such as "300 MiB". Raises ValueError with what is allowed."""
    if isinstance(value, int) and not isinstance(value, bool) and value <= _MOST_BYTES:
        return value
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        size = float(match[1]) * _UNITS[match[2]]  # infinite, of digits enough
        if size <= _MOST_BYTES:
            return round(size)
    raise ValueError(f"{value!r} is not a size; write bytes, or a number with {', '.join(_UNITS)}")


Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]


# A class of term, by the name that arbiter.pool.Term has in capitals; the shortest first.
KvTerm = Literal["short", "long", "extended"]
USUAL: KvTerm = "long"  # of an engine that is told nothing

LONGEST_S = 31_622_400.0  # a leap year; beyond 292 of them nanoseconds do not fit


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
