"""The variables of the environment that Ray, Serve and the engines read when they start, as the
system is meant to run. `arbiter serve` sets them. None is needed for correctness: a plain `serve
run` works without them. The standard library only."""

from collections.abc import Mapping

VARIABLES = {
    # A replica's process has Serve imported when it starts (wake -0.3 s).
    "RAY_preload_python_modules": "deployments.worker_start",
    # Idle workers are prestarted, so several wakes at once do not queue.
    "RAY_worker_maximum_startup_concurrency": "8",
    # Proxy, front and replicas stream to each other by gRPC, not as one object of Ray for each
    # piece: half the processor time of a token outside its engine. The port for it is open in every
    # replica of Serve either way.
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    # Of that, in bytes; Serve's 4 MB is less than a body may have.
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(256 << 20),
    # Fronts and replicas compute nothing, so they need no thread beside Serve's, and no hop to it
    # with each piece.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # Each proxy starts with our middlewares; without this they are put around it once the front's
    # application is built (deployments.front.plain_proxies).
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.front.proxy:middlewares",
    # Serve's controller looks four times a second, not ten, and counts go to its gauges each
    # second, not ten times: at rest the two took 30 ms of processor time a second (docs/adr/0041).
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
    # Nothing here reads Ray's statistics of its own event loops, nor its list of tasks.
    "RAY_event_stats": "0",
    "RAY_task_events_report_interval_ms": "0",
    # Ray's log monitor looks for new files twice a second, not ten times.
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    # Replicas reserve no GPU with Ray; the arbiter chooses for them.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Models are local; an engine never waits for a hub that cannot be reached.
    "HF_HUB_OFFLINE": "1",
    # No report to outside.
    "RAY_USAGE_STATS_ENABLED": "0",
}


def completed(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment with the variables that it does not set itself."""
    return {**VARIABLES, **environment}
