"""A stand-in for a training job: holds touched memory until it is asked to end.

python -m tests.support.trainer MIB [later]

With `later` it takes the memory when it has read a line.
"""

import mmap
import signal
import sys


def main() -> None:
    size = int(sys.argv[1]) << 20
    if "later" in sys.argv[2:]:
        sys.stdin.readline()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE  # touched, every page
    held = mmap.mmap(-1, size, flags)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("training", flush=True)
    while len(held):
        signal.pause()


if __name__ == "__main__":
    main()
