"""One Ray cluster for the whole session, made when the first test asks for it; each test that does
starts and stops its own arbiter on it.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# No test is timed: neither one example nor making many that waits for a busy machine is a failure.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

ROOT = Path(__file__).parents[1]

# Read by Serve when it is imported. Each test has an event loop of its own, and the router of a
# handle must outlive it; the graph's own processes have one loop, and are told so by its fixture.
os.environ["RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"] = "1"

# Read by Ray when it starts. Workers and zygotes import the repository; a Serve replica starts in a
# process that has its modules already; no token file is left in anybody's home.
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "RAY_preload_python_modules": "deployments.worker_start",
    "RAY_worker_maximum_startup_concurrency": "4",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    import ray

    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        yield
        ray.shutdown()
