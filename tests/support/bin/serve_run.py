"""`serve` of Ray, but that what it starts starts workers by `fork_worker.py`."""

import sys
from pathlib import Path

from ray._private import ray_constants
from ray.serve.scripts import cli

if __name__ == "__main__":
    ray_constants.SETUP_WORKER_FILENAME = str(Path(__file__).with_name("fork_worker.py"))
    sys.exit(cli())
