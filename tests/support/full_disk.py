"""A disk that takes no more, for what this process writes."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

FULL_BYTES = 256 << 10  # of the largest file


@contextmanager
def full_disk(most_bytes: int = FULL_BYTES) -> Iterator[None]:
    """No file of this process grows beyond `most_bytes`. Python ignores the signal: it is EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
