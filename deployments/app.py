"""Builders of Serve applications. `import_path` in serve_config.yaml names `front`, and the front
calls `of_table` for each row of its table. For a capability's deployment with options of its own
`import_path` may name `capability` (CONTRIBUTING.md)."""

import asyncio
import hashlib
import importlib
import json
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from deployments.config.capability_section import CapabilityConfig
from deployments.config.config_file import CapabilityArgs, FrontArgs
from deployments.config.schema import ConfigError

# By role, and `rerank`, which a row of the table names by `class`.
CLASSES = {
    "text": "deployments.capabilities.text:TextServer",
    "embedding": "deployments.capabilities.embedding:EmbeddingServer",
    "rerank": "deployments.capabilities.rerank:RerankServer",
    "vision": "deployments.capabilities.vision:VisionServer",
    "image": "deployments.capabilities.image:ImageServer",
    "asr": "deployments.capabilities.asr:TranscriptionServer",
    "tts": "deployments.capabilities.tts:SpeechServer",
    "vad": "deployments.capabilities.vad:VadServer",
}

# A handle reports its queue this often while it has requests, and the first request at once
# (ray_internals.quiet_when_idle). With Serve's defaults (10 s, 30 s) a second replica would come
# after seven to ten seconds; a report each 0.1 s took 14 ms of processor time a second in the front
# and as much in the controller.
METRICS_INTERVAL_S, LOOK_BACK_PERIOD_S = 0.5, 0.6

SCALING = "deployments.scaling:CapabilityPolicy"

# Above the longest generation. A replica that is told to stop finishes its streams first; if Serve
# ended it sooner, they would break off.
GRACEFUL_SHUTDOWN_TIMEOUT_S = 600.0

# Each replica is asked each second what it has: with Serve's 10 s a model is long gone by then.
ROUTING: dict[str, Any] = {
    "request_router_class": "deployments.routing.router:ResidentRouter",
    "request_routing_stats_period_s": 1.0,
}
ROUTER = RequestRouterConfig(**ROUTING)

# Serve's own log line for each call is off: it flushes two files, a third of a replica's time for a
# call. Our line for a call names model, ticket and wait; the proxy's has status and time.
LOGGING = {"enable_access_log": False}

# Of each capability's deployment. Devices are the arbiter's to place, so no GPUs or CPUs are
# reserved with Ray.
OPTIONS: dict[str, Any] = {
    "max_ongoing_requests": 256,
    "max_queued_requests": 512,
    "ray_actor_options": {"num_cpus": 0, "num_gpus": 0},
    "graceful_shutdown_timeout_s": GRACEFUL_SHUTDOWN_TIMEOUT_S,
    "graceful_shutdown_wait_loop_s": 0.1,
    "logging_config": LOGGING,
    "health_check_period_s": 2,
}
# Zero replicas until asked.
AUTOSCALING: dict[str, Any] = {
    "min_replicas": 0,
    "initial_replicas": 0,
    "metrics_interval_s": METRICS_INTERVAL_S,
    "look_back_period_s": LOOK_BACK_PERIOD_S,
    "upscale_delay_s": 0,
    "downscale_delay_s": 5,
}


def front(args: FrontArgs) -> Application:
    """Returns the application of the HTTP front. Where Serve builds it, its proxies get our
    middlewares first, because a front that never starts could not give them."""
    from deployments.front.ingress import Front
    from deployments.front.plain_proxies import PlainProxies

    if ray.is_initialized():  # it is not under `arbiter check`, which has no proxies
        with ThreadPoolExecutor(1) as thread:  # in a notebook this thread runs a loop already
            thread.submit(asyncio.run, PlainProxies().wrap()).result()
    application: Application = Front.options(logging_config=LOGGING).bind()  # type: ignore[attr-defined]
    return application


def capability(args: CapabilityArgs) -> Application:
    """Returns the application of any capability. `class` in `args` names its class, from any
    package. Raises ConfigError."""
    return _capability(_class_of(args.class_), args)


def of_table(name: str, config: CapabilityConfig) -> Application:
    """The application of one row of the table, scaled as the arbiter says. Raises ConfigError."""
    server = _class_of(class_path(config))
    args = CapabilityArgs(capability=name, max_replicas=config.max_replicas)
    return _capability(server, args, scaling_of(name, config))


def scaling_of(name: str, config: CapabilityConfig) -> dict[str, object]:
    """Returns the part of `autoscaling_config` that comes from a row of the table. The front
    compares it with what Serve has, to see whether the capability is deployed as the row now is.
    Raises ConfigError."""
    path = class_path(config)
    described = {"capability": name, "class_path": path or "", "digest": digest_of(_class_of(path))}
    policy = {"policy_function": SCALING, "policy_kwargs": described}
    return {"max_replicas": config.max_replicas, "policy": policy}


def digest_of(server: type) -> str:
    """Sixteen hex digits that change with the source of a class or its bases, and with the options
    of its deployment. Of the files as they are now, because replicas start from those. Raises
    ConfigError."""
    options = json.dumps([OPTIONS, AUTOSCALING, ROUTING], sort_keys=True)
    digest = hashlib.sha256(options.encode())
    for base in server.__mro__:
        file = getattr(sys.modules[base.__module__], "__file__", None)
        try:
            digest.update(Path(file).read_bytes() if file else b"")
        except OSError as error:
            raise ConfigError(f"the source of {base.__name__} cannot be read: {error}") from error
    return digest.hexdigest()[:16]


def class_path(config: CapabilityConfig) -> str | None:
    """`module:Class` of a row; None: Capability itself. Raises ConfigError."""
    if config.class_ is None:
        return None if config.paths else CLASSES.get(config.role)
    if ":" in config.class_:
        return config.class_
    if config.class_ not in CLASSES:
        names = ", ".join(CLASSES)
        raise ConfigError(f"class: no {config.class_!r}; there is: {names}, or `module:Class`")
    return CLASSES[config.class_]


# Of a module that a person wrote: what its text and what it runs at import may raise.
IMPORT_ERRORS = (
    ImportError,
    SyntaxError,
    OSError,
    RuntimeError,
    AttributeError,
    NameError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AssertionError,
)


def _class_of(path: str | None) -> type:
    """Raises ConfigError."""
    from deployments.replica.capability import Capability

    if path is None:
        return Capability
    module, _, name = path.partition(":")
    try:
        cls = getattr(importlib.import_module(module), name)
    except IMPORT_ERRORS as error:
        raise ConfigError(f"class {path!r}: {type(error).__name__}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Capability)):
        raise ConfigError(f"class {path!r} is no subclass of {Capability.__name__}")
    return cls


def _capability(
    server: type, args: CapabilityArgs, scaling: Mapping[str, object] = MappingProxyType({})
) -> Application:
    """`scaling`: more of `autoscaling_config`."""
    deployment = serve.deployment(
        server,
        name=args.capability,
        request_router_config=ROUTER,
        autoscaling_config={**AUTOSCALING, "max_replicas": args.max_replicas, **scaling},
        **OPTIONS,
    )
    return deployment.bind(args.capability)
