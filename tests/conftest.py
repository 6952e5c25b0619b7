"""What is started once for the whole session, when the first test asks for it: one Ray cluster, on
which each test starts and stops its own arbiter, and one zygote with the imports of every engine.
"""

import atexit
import gc
import os
import signal
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from deployments.config.start_variables import VARIABLES
from tests.support.examples import examples

# No test is timed: neither one example nor making many that waits for a busy machine is a failure.
settings.register_profile(
    "untimed",
    deadline=None,
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("untimed")

if TYPE_CHECKING:
    from tests.support.engine_host import ZygoteUnderTest

# A shell has its background jobs ignore SIGINT, and what they start ignores it too: `serve run`
# would not end on Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parents[1]
SUMMARY_FROM_S = 60  # of tests in all
ENGINES = ",".join(
    f"deployments.engines.{name}"
    for name in (
        "vllm.preload",
        "sentence_transformers",
        "diffusers.preload",
        "audio.faster_whisper",
        "audio.vits",
        "audio.kokoro",
        "audio.silero",
    )
)

for name in ("HF_HUB_OFFLINE", "RAY_USAGE_STATS_ENABLED"):
    os.environ.setdefault(name, VARIABLES[name])

# Read by Serve when it is imported. Each test has an event loop of its own, and the router of a
# handle must outlive it; the graph's own processes have one loop, and are told so by its fixture.
os.environ["RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"] = "1"

# What an idle cluster does less of, in the tests as in the system.
RESTS = (
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS",
    "RAY_event_stats",
    "RAY_task_events_report_interval_ms",
)

# Each process that a test starts would report its series, which Ray keeps when it has ended.
NOT_EXPORTED = {"RAY_enable_metrics_collection": "0"}

# Read by Ray when it starts. Workers and zygotes import the repository; no token file is left in
# anybody's home. Workers import nothing of Serve ahead, unlike those of `make serve`: most here
# become arbiters, agents and holders.
# No test reads what Ray's reporter of processes would tell.
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "RAY_worker_maximum_startup_concurrency": "4",
    "RAY_AUTH_MODE": "disabled",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
    **NOT_EXPORTED,
    **{name: VARIABLES[name] for name in RESTS},
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


# While tests are imported there is no garbage worth a look at all that was imported before.
gc.disable()


# So that libraries that count what is left at the end find nothing. Behind pytest's own last look
# for what was never closed, which would take a second more.
atexit.register(gc.unfreeze)


# Where tests drive real servers, what is not closed, or fails in a finalizer or a thread, may be
# that of a library whose client or runtime ends with its process (OpenAI's, Ray's, Playwright's).
OF_ONE_PROCESS = ("unit", "model", "sim", "style")
MAY_END_UNSEEN = (
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(ROOT / "tests").parts[0] not in OF_ONE_PROCESS:
            for rule in MAY_END_UNSEEN:
                item.add_marker(pytest.mark.filterwarnings(rule))


def pytest_collection_finish() -> None:
    """What was imported stays, and the little garbage of its imports. The collector would look
    through it again and again, which takes longer than most tests."""
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where the time went, by folder: the whole is to stay under 40 minutes."""
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds["/".join(report.nodeid.split("/")[:2])] += report.duration
    if sum(seconds.values()) > SUMMARY_FROM_S:
        terminalreporter.section("seconds by folder")
        for folder, took_s in sorted(seconds.items(), key=lambda item: -item[1]):
            terminalreporter.write_line(f"{took_s:7.0f}  {folder}")


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    import ray

    from tests.support.worker_forks import forking_workers

    os.environ.update(ENVIRONMENT)
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        forking_workers(Path(folder) / "workers"),
    ):
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        # One looks at the log of each process that any test has started, ten times a second, the
        # other for nodes to add, where there is nothing to add them with.
        ray._private.worker._global_node.kill_log_monitor()
        ray._private.worker._global_node.kill_monitor()
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def serving(cluster: None) -> Iterator[None]:
    """Serve without its HTTP proxy."""
    from ray import serve
    from ray.serve.schema import LoggingConfig

    serve.start(proxy_location="Disabled", logging_config=LoggingConfig(enable_access_log=False))
    yield
    serve.shutdown()


@pytest.fixture(scope="session")
def tiny() -> Path:
    from models.make_models import TINY, default_folder, make

    return make(default_folder(), TINY)


@pytest.fixture(scope="session")
def medium() -> Path:
    from models.make_models import MEDIUM, default_folder, make

    return make(default_folder(), MEDIUM)


@pytest.fixture(scope="session")
def describer() -> Path:
    """The default model of vision, whose weights the repository carries."""
    from models import shipped
    from models.make_models import default_folder

    return shipped.unpack(shipped.WEIGHTS / "vision", default_folder())


@pytest.fixture(scope="session")
def drawing() -> Path:
    """The default model of pictures, whose weights the repository carries."""
    from models import shipped
    from models.make_models import default_folder

    return shipped.unpack(shipped.WEIGHTS / "images", default_folder())


@pytest.fixture(scope="session")
def engines() -> Iterator["ZygoteUnderTest"]:
    """A zygote with every real engine's imports done, which take it 5 s and more."""
    from tests.support.engine_host import zygote

    with zygote(ENGINES) as running:
        yield running
