"""Where the state file lies. Commands ask only for this, so it imports nothing of the arbiter."""

import os
from pathlib import Path


def default_path() -> Path:
    """Returns the state file beside the user's other state, as the XDG base directory specification
    has it."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "serve-arbiter" / "arbiter.sqlite"
