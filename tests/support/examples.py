"""How many examples a property is tried with: in `make test` a quarter of what `make model` draws,
which is what the planted bugs are held against (tests.mutate)."""

import os

SHARE = float(os.environ.get("EXAMPLES_SHARE", "0.25"))


def examples(count: int) -> int:
    """The share of this run, at least one."""
    return max(1, round(count * SHARE))
