"""Programs beside Python's that some tests run: where they are, or why the test is skipped."""

import os
import shutil

import pytest

REQUIRED = "ARBITER_REQUIRED_TOOLS"  # their names, with spaces between: a test without one fails


def tool(name: str) -> str:
    """Returns the path of a program. Skips the test where it is not installed."""
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin")  # not on each user's PATH
    if path is None:
        required = os.environ.get(REQUIRED, "").split()
        assert name not in required, f"{name} is not installed, and {REQUIRED} names it"
        pytest.skip(f"{name} is not installed")
    return path
