"""What configuration and bodies are made of: sizes as people write them, and models that refuse
what they do not know."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from arbiter.opening_hours import check_zone, parse
from arbiter.units import GIB, KIB, MIB

_UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(" + "|".join(_UNITS) + r")")


_MOST_BYTES = 1 << 60  # an exbibyte: a million of the largest nodes; floats hold it with ease


def parse_size(value: object) -> int:
    """Bytes from an int or from text such as "300 MiB". Raises ValueError with what is allowed."""
    if isinstance(value, int) and not isinstance(value, bool) and value <= _MOST_BYTES:
        return value
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        size = float(match[1]) * _UNITS[match[2]]  # a float, which is infinite for too many digits
        if size <= _MOST_BYTES:
            return round(size)
    raise ValueError(f"{value!r} is not a size; write bytes, or a number with {', '.join(_UNITS)}")


Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]


def parse_hours(value: Any) -> str:
    """Windows of the day as one text, from `22-07` or a list of such; empty: none. Raises
    ValueError, saying what is wrong."""
    parts = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(part, str) for part in parts):
        raise ValueError(f"{value!r} are no hours; write 22-07, or a list of such")
    text = ", ".join(parts)
    return str(parse(text)) if text else ""


Hours = Annotated[str, BeforeValidator(parse_hours)]  # C13, as arbiter.opening_hours reads it
Zone = Annotated[str, AfterValidator(check_zone)]


# A class of term, by the name that arbiter.pool.Term has in capitals; the shortest first.
KvTerm = Literal["short", "long", "extended"]
USUAL: KvTerm = "long"  # the class of term where nothing names one


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
