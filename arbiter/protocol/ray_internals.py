"""The few semi-internal things asked of Ray, in one place; tests/contracts holds each of them."""

import sys
import threading
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from arbiter.protocol.messages import NAMESPACE, node_of
from arbiter.units import NodeId

Raised = TypeVar("Raised", bound=Exception)


def raised_there(error: RayError, kind: type[Raised]) -> Raised | None:
    """Returns what the other process raised, as itself, if it is of this kind. None for anything
    else that it raised, which is a bug over there, and for what Ray says of the call."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, kind) else None


def session_name() -> str:
    """Names one life of the cluster."""
    name: str = ray._private.worker._global_node.session_name
    return name


_STATE_FILE = b"state_file"


def note_state_file(path: Path) -> None:
    """Has the cluster's control store remember where its arbiter keeps its state."""
    written = str(path.absolute()).encode()
    internal_kv._internal_kv_put(_STATE_FILE, written, namespace=NAMESPACE.encode())


def noted_state_file() -> Path | None:
    """Returns what `note_state_file` noted last; None where no arbiter of this cluster has."""
    path = internal_kv._internal_kv_get(_STATE_FILE, namespace=NAMESPACE.encode())
    return Path(path.decode()) if path else None


def logs_folder() -> Path:
    """Returns Ray's log folder on this node; the dashboard shows what lies here."""
    return Path(ray._private.worker._global_node.get_logs_dir_path())


def session_folder() -> Path | None:
    """Returns Ray's session folder on this node; None in a process outside a cluster."""
    node = ray._private.worker._global_node
    return Path(node.get_session_dir_path()) if node is not None else None


def own_node() -> NodeId:
    return node_of(ray.get_runtime_context().get_node_id())


def own_handle() -> Any | None:
    """This actor's handle, or None in a driver. In a Serve replica: the replica actor's."""
    context = ray.get_runtime_context()
    return context.current_actor if context.get_actor_id() else None


def living_nodes() -> dict[NodeId, str]:
    """Returns our name and Ray's id of every node that is up."""
    return {node_of(n["NodeID"]): n["NodeID"] for n in ray.nodes() if n["Alive"]}


def head_node() -> str:
    """Returns Ray's id of the head; of any living node where none says that it is."""
    nodes = [n for n in ray.nodes() if n["Alive"]]
    heads = [n for n in nodes if "node:__internal_head__" in n["Resources"]]
    return str((heads or nodes)[0]["NodeID"])


def on_node(ray_node_id: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(ray_node_id, soft=False)


PRESTART_S = 5.0  # the raylet answers before the process is there


async def prestart_worker(keep_s: int) -> None:
    """Has Ray start one more idle worker on this node, of no job and no runtime environment, which
    Ray does not end before `keep_s`: what Ray itself does ahead of a driver's tasks. Raises
    ConnectionError."""
    import grpc
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import node_manager_pb2, node_manager_pb2_grpc

    node = ray._private.worker._global_node
    address = f"{node.node_ip_address}:{node.node_manager_port}"
    request = node_manager_pb2.PrestartWorkersRequest(
        num_workers=1, keep_alive_duration_secs=keep_s
    )
    try:
        async with init_grpc_channel(address, asynchronous=True) as channel:
            raylet = node_manager_pb2_grpc.NodeManagerServiceStub(channel)
            await raylet.PrestartWorkers(request, timeout=PRESTART_S)
    except grpc.RpcError as error:
        raise ConnectionError(f"{address}: {error}") from error


async def owner_died(call: Awaitable[Any]) -> bool:
    """Waits for the end of a call of ours that another process owns. False when the call itself
    ended or broke, which it also does while we are being killed: its owner lives."""
    try:
        await call
    except ray.exceptions.RayActorError:
        return False
    except ray.exceptions.RayError:
        return True
    return False


# Calls in flight beside the queue: three of each holder (keepalive, listen, renew), event streams,
# long polls. Thousands of holders fit; an unused place costs nothing.
OTHER_CALLS = 50_000


def detached(ray_node_id: str, name: str, namespace: str, waiting_count: int = 0) -> dict[str, Any]:
    """Returns the options of the only actor of its name, which outlives the process that started
    it. Ray never repeats its calls: the protocol's own messages may be repeated, safely.
    `waiting_count`: calls that may wait in a bounded queue; what exceeds it must still get in, to
    be refused."""
    return {
        "name": name,
        "namespace": namespace,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "max_task_retries": 0,
        "num_cpus": 0,
        "max_concurrency": waiting_count + OTHER_CALLS,
        "scheduling_strategy": on_node(ray_node_id),
    }


# Reports of a handle without a request that still go out: as many as cover the look-back of the
# mean that Serve makes of them, and one in so many after that. Serve forgets a handle that was
# silent for 10 s (RAY_SERVE_MIN_HANDLE_METRICS_TIMEOUT_S), and reports come two a second.
IDLE_REPORTS, IDLE_EVERY = 4, 10

# Serve's controller looks so often, for so long after it was last asked to. A look costs it 5 ms.
SOON_S, SOON_FOR_S = 0.05, 1.0
# Reports of a handle all of whose requests wait, by which it asks for that; two a second.
WAITING_REPORTS = 20


def quiet_when_idle(handle: Any) -> None:
    """Has a handle of Serve say how many requests it has as the controller is told, not as they
    were when they were last counted, and say it less often while there are none. A report costs
    handle and controller 2 ms; the first one of a request wakes a capability with zero replicas,
    and while no replica has any the controller is asked to look sooner. For a handle whose options
    are set and that has not been called."""
    metrics = handle._router._asyncio_router._metrics_manager
    count = metrics._add_autoscaling_metrics_point
    report = metrics.push_autoscaling_metrics_to_controller
    silent = waiting = 0

    def report_changes() -> None:
        nonlocal silent, waiting
        is_served = any(metrics.num_requests_sent_to_replicas.values())
        is_waiting = metrics.num_queued_requests and not is_served
        silent = 0 if is_waiting or is_served else silent + 1
        waiting = waiting + 1 if is_waiting else 0
        if 0 < waiting <= WAITING_REPORTS:
            metrics._controller_handle.__ray_call__.remote(_quicken)
        if silent <= IDLE_REPORTS or silent % IDLE_EVERY == 0:
            count()
            report()

    metrics.push_autoscaling_metrics_to_controller = report_changes


class ControlPace:
    """How often Serve's controller looks at its deployments, in its process. It waits as long as
    its variable says between two looks, and a start of a replica takes four of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # policies call on the controller's loop, handles in threads
        self._until_s = 0.0
        self._is_quick = False

    def quicken(self) -> None:
        """Has it look each SOON_S for the next SOON_FOR_S. In another process it does nothing."""
        controller: Any = sys.modules.get("ray.serve._private.controller")
        if controller is None:
            return
        with self._lock:
            self._until_s = time.monotonic() + SOON_FOR_S
            if not self._is_quick:
                self._is_quick = True
                controller.CONTROL_LOOP_INTERVAL_S = min(SOON_S, _control_interval_s())
                threading.Thread(target=self._rest, args=(controller,), daemon=True).start()

    def _rest(self, controller: Any) -> None:
        """Waits for the end, which each call puts off."""
        while True:
            with self._lock:
                left_s = self._until_s - time.monotonic()
                if left_s <= 0:
                    controller.CONTROL_LOOP_INTERVAL_S = _control_interval_s()
                    self._is_quick = False
                    return
            time.sleep(left_s)


PACE = ControlPace()


def _control_interval_s() -> float:
    from ray.serve._private.constants import CONTROL_LOOP_INTERVAL_S

    return float(CONTROL_LOOP_INTERVAL_S)


def _quicken(controller: Any) -> None:
    """Runs in the controller."""
    PACE.quicken()


def waits_for_replica(context: Context) -> bool:
    """Says whether no replica has taken a request of Serve's proxy yet. `context`: that in which
    the proxy runs for this request. Serve's router has the request until a replica accepts it."""
    from ray.serve import context as serve_context

    request = context.get(serve_context._serve_request_context)
    if request is None:
        return False
    return request._internal_request_id in serve_context._requests_pending_assignment


@contextmanager
def counted_by_proxy(app: Any) -> Iterator[None]:
    """Counts a request that goes past Serve's proxy like those that it carries, because the proxy
    of a node that is drained ends once it has none. `app`: as a middleware of the proxy gets it."""
    proxy = _proxy_behind(app)
    if proxy is None:
        yield
        return
    proxy._ongoing_requests_start()
    try:
        yield
    finally:
        proxy._ongoing_requests_end()


def deployment_at(app: Any, path: str) -> str | None:
    """Returns the deployment to which Serve's proxy sends requests for a path; None where it is
    none. `app`: as a middleware of the proxy gets it."""
    proxy = _proxy_behind(app)
    match = None if proxy is None else proxy.proxy_router.match_route(path)
    return None if match is None else match[1].deployment_id.name


def _proxy_behind(app: Any) -> Any | None:
    while app is not None and not hasattr(app, "_ongoing_requests_start"):
        app = getattr(app, "_app", None)
    return app


def proxies() -> list[Any]:
    """Returns handles of Serve's HTTP proxies on living nodes."""
    from ray.serve._private.constants import SERVE_NAMESPACE, SERVE_PROXY_NAME
    from ray.serve._private.utils import format_actor_name

    handles = []
    for ray_node_id in living_nodes().values():
        with suppress(ValueError):  # no proxy runs there
            name = format_actor_name(SERVE_PROXY_NAME, ray_node_id)
            handles.append(ray.get_actor(name, namespace=SERVE_NAMESPACE))
    return handles


def serve_controller() -> Any | None:
    """Returns the handle of Serve's controller; None where Serve does not run."""
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    with suppress(ValueError):
        return ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    return None


def put_around_new_proxies(controller: Any, middlewares: list[Any]) -> None:
    """Has Serve's controller start each proxy from now on with these middlewares of Starlette,
    outermost last; of several calls the last counts. Called in the controller's process, with the
    actor. Serve's own option for them, which each of its clients reads, stays empty."""
    manager = controller.proxy_state_manager
    if manager is None:  # it starts none
        return
    start = type(manager)._start_proxy

    def started(*args: Any, http_options: Any = None, **options: Any) -> Any:
        with_ours = deepcopy(http_options or manager._http_options)
        with_ours.middlewares.extend(middlewares)
        return start(manager, *args, http_options=with_ours, **options)

    manager._start_proxy = started


def put_around_proxy(proxy: Any, middlewares: list[Any]) -> bool:
    """Puts middlewares of Starlette, outermost last, around what a proxy of Serve answers with,
    also on connections that are open. Called in the proxy's process, with the actor. Returns False
    where the last is the outermost already."""
    from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

    _, server = proxy._start_http_server_task.result()
    outer = server.config.loaded_app  # uvicorn's own, which knows whom the client came from
    inner = outer.app if isinstance(outer, ProxyHeadersMiddleware) else None
    if inner is None:
        raise RuntimeError(f"the proxy's server wraps it in {type(outer).__name__}, not as known")
    if isinstance(inner, middlewares[-1].cls):
        return False
    for middleware in middlewares:
        inner = middleware.cls(inner, *middleware.args, **middleware.kwargs)
    outer.app = inner
    return True


@cache
def headers_of_proxy() -> frozenset[bytes]:
    """Headers whose values Serve's proxy decodes, of those that reach it, as names with hyphens;
    `_` counts as one there. A value that is not UTF-8 is an exception of the proxy."""
    from ray.serve._private import constants

    names = (
        constants.SERVE_HTTP_REQUEST_ID_HEADER,
        constants.SERVE_MULTIPLEXED_MODEL_ID,
        constants.SERVE_SESSION_ID,
        "traceparent",  # where tracing is on
    )
    return frozenset(name.lower().replace("_", "-").encode() for name in names)
