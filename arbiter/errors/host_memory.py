"""Errors of what lies in host RAM: copies of models' files, and the pool's slabs."""

from arbiter.errors.base import ArbiterError, RequestError, error_fields
from arbiter.units import Bytes, human


@error_fields
class HostRamShort(RequestError):
    """No copy of a model's files is made (D4); its engine reads the files."""

    status_code, code = 409, "host_ram_short"

    copy: str  # the name of the model's files
    need_bytes: Bytes
    free_bytes: Bytes

    def __str__(self) -> str:
        need, free = human(self.need_bytes), human(self.free_bytes)
        return (
            f"no host copy of {self.copy}: it needs {need} of host RAM, and {free} are free;"
            " its engine reads the files instead; `arbiter.arenas.host` bounds what copies may have"
        )


@error_fields
class UnknownHostCopy(RequestError):
    status_code, code = 404, "host_copy_not_found"

    key: str

    def __str__(self) -> str:
        return f"no host copy {self.key!r}; `arbiter copies` shows those there are"


@error_fields
class SlabUnusable(ArbiterError):
    """Contents that are damaged do not raise this: they are as if they were not there."""

    path: str
    cause: str

    def __str__(self) -> str:
        return f"{self.path} cannot be used as a slab: {self.cause}; a node agent creates slabs"


@error_fields
class RowMisused(ArbiterError):
    key: str  # in hexadecimal
    cause: str

    def __str__(self) -> str:
        return f"row of key {self.key}: {self.cause}; this is a bug of the process that writes it"
