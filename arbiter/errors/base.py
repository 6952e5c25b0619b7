"""What all errors of this package have in common."""

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Self, TypeVar, dataclass_transform

E = TypeVar("E", bound=Exception)


@dataclass_transform(eq_default=False)
def error_fields(kind: type[E]) -> type[E]:
    """Makes an error a dataclass, for its fields only: errors compare as ArbiterError says, and
    print as exceptions do, because the hash of a recording is made of that."""
    return dataclass(eq=False, repr=False)(kind)


class ArbiterError(Exception):
    """Base of everything raised here. Compares by value, so that a decision carrying one can be
    replayed and compared. Pickles by its fields, from which Ray rebuilds it in the caller's
    process."""

    def values(self) -> tuple[Any, ...]:
        """Returns its fields; the arguments where it is no dataclass."""
        return (
            tuple(getattr(self, f.name) for f in fields(self)) if is_dataclass(self) else self.args
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.values()

    def unraised(self) -> Self:
        """Returns an equal error that was never raised, to be kept: an error that was raised holds
        the frames through which it went, and all that these refer to."""
        return type(self)(*self.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArbiterError) and (
            (type(self), self.values()) == (type(other), other.values())
        )

    def __hash__(self) -> int:
        return hash((type(self), self.values()))


class RequestError(ArbiterError):
    """An answer that the caller can act on; it maps to one HTTP status."""

    status_code = 503
    code = "request_refused"  # the `code` of OpenAI's error object
    retry_after_s: float | None = None
    param: str | None = None  # the field of the request that is at fault, where one is
