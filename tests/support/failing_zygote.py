"""A zygote that says why it cannot start, and ends."""

import sys

if __name__ == "__main__":
    sys.exit("ModuleNotFoundError: No module named 'missing'")
