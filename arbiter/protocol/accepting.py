"""What the accept of a listening socket may raise although the socket is sound."""

import errno

SHORT_PAUSE_S = 1.0  # as long as asyncio's own servers wait then (ACCEPT_RETRY_DELAY)


def is_shortage(error: OSError) -> bool:
    """Says whether the process or the machine is short of descriptors or memory, for now."""
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
