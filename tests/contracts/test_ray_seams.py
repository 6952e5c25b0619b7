"""What we rely on in Ray beyond its documented interface. An upgrade that changes one fails here,
by name, and not in a user's cluster.
"""

import asyncio
import contextvars
import inspect
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import ray
import uvicorn
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.serve import context as serve_context
from ray.serve._private import controller, http_util, proxy, proxy_state
from ray.serve._private.common import DeploymentID, EndpointInfo
from ray.serve._private.controller import ServeController
from ray.serve._private.http_util import RequestIdMiddleware
from ray.serve._private.proxy import GenericProxy, HTTPProxy
from ray.serve._private.proxy_router import ProxyRouter
from ray.serve._private.router import (
    AsyncioRouter,
    CurrentLoopRouter,
    RouterMetricsManager,
    SingletonThreadRouter,
)
from ray.serve.config import AutoscalingContext
from starlette.responses import PlainTextResponse
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from arbiter.errors import NeverFits
from arbiter.node import spare_workers
from arbiter.protocol import ray_internals
from arbiter.units import Bytes, TicketId
from deployments.app import SCALING
from deployments.replica.capability import Capability
from deployments.routing.router import ResidentRouter
from deployments.scaling import ArbiterPolicy, Context
from tests.support.waits import eventually

pytestmark = pytest.mark.usefixtures("cluster")


@ray.remote(num_cpus=0, max_concurrency=100)
class Probe:
    """An asyncio actor with a plain constructor, as ours are."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.started = asyncio.ensure_future(asyncio.sleep(0))
        self.lost: set[int] = set()

    async def same_loop(self) -> bool:
        await self.started
        return asyncio.get_running_loop() is self.loop

    async def places(self) -> tuple[str, str]:
        return ray_internals.session_name(), str(ray_internals.logs_folder())

    async def note_state_file(self, path: str) -> None:
        ray_internals.note_state_file(Path(path))

    async def spares(self) -> list[int]:
        return spare_workers.unused()

    async def pid(self) -> int:
        return os.getpid()

    async def prestart(self) -> None:
        await ray_internals.prestart_worker(60)

    async def refuse(self) -> None:
        raise NeverFits(TicketId("t"), Bytes(2), Bytes(1))

    async def forever(self) -> None:
        await asyncio.Event().wait()

    async def watch(self, handles: list[Any], refs: list[Any], pid: int) -> None:
        await handles[0].__ray_ready__.remote()
        self.watching = asyncio.ensure_future(self._watch(refs[0], pid))

    async def _watch(self, ref: Any, pid: int) -> None:
        try:
            await ref
        except RayError:
            self.lost.add(pid)

    async def has_lost(self, pid: int) -> bool:
        return pid in self.lost


@ray.remote(num_cpus=0)
class Owner:
    """Owns a pending call, as every holder does."""

    async def own(self, probe: Any) -> int:
        self.pending = probe.forever.remote()
        await probe.watch.remote([ray_internals.own_handle()], [self.pending], os.getpid())
        return os.getpid()


@pytest.fixture
def probe() -> Iterator[Any]:
    made = Probe.remote()
    yield made
    ray.kill(made)


async def test_a_plain_constructor_of_an_asyncio_actor_runs_on_its_loop(probe: Any) -> None:
    assert await probe.same_loop.remote()


async def test_session_name_and_log_folder_are_found_in_a_worker(probe: Any) -> None:
    session, logs = await probe.places.remote()
    assert session in logs and Path(logs).is_dir()


@pytest.mark.spec("A20")
async def test_what_a_worker_notes_in_the_control_store_is_read_by_a_driver(probe: Any) -> None:
    for path in ("/one/arbiter.sqlite", "/other/arbiter.sqlite"):
        await probe.note_state_file.remote(path)
        assert ray_internals.noted_state_file() == Path(path)


@pytest.mark.spec("N3")
async def test_a_worker_started_ahead_is_unused_until_the_next_actor_takes_it() -> None:
    """Ray starts a few by itself, so that there may be more than the one. The probe has a runtime
    environment, so that it is no fork and the raylet is its parent, as that of an agent is."""
    probe = Probe.options(runtime_env={"env_vars": {"PROBE": "1"}}).remote()
    taking = [probe]

    async def take() -> int:
        taking.append(Probe.remote())
        pid: int = await taking[-1].pid.remote()
        return pid

    while await probe.spares.remote():  # those that Ray began with
        await take()
    await probe.prestart.remote()
    await eventually(probe.spares.remote, 60)
    unused = await probe.spares.remote()
    taken = await take()
    assert taken in unused
    assert taken not in await probe.spares.remote()
    for actor in taking:
        ray.kill(actor)


async def test_request_errors_keep_their_type_across_processes(probe: Any) -> None:
    with pytest.raises(RayTaskError) as caught:
        await probe.refuse.remote()
    assert caught.value.cause == NeverFits(TicketId("t"), Bytes(2), Bytes(1))
    assert isinstance(caught.value, NeverFits)


async def test_an_owners_death_is_noticed_when_its_handle_was_called(probe: Any) -> None:
    owner = Owner.remote()
    pid = await owner.own.remote(probe)
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: probe.has_lost.remote(pid), 60)


def test_an_unavailable_actor_is_told_apart_from_a_dead_one() -> None:
    assert issubclass(ActorUnavailableError, RayActorError) and issubclass(RayActorError, RayError)
    assert not issubclass(RayTaskError, RayActorError)


def test_ray_lists_living_nodes_and_the_head_node() -> None:
    nodes = ray.nodes()
    assert all({"NodeID", "Alive", "Resources"} <= node.keys() for node in nodes)
    assert ray_internals.head_node() in {n["NodeID"] for n in nodes}
    assert "node:__internal_head__" in nodes[0]["Resources"]
    assert ray_internals.own_node() in ray_internals.living_nodes()


def test_serve_gives_scaling_policies_the_fields_that_arbiter_policy_reads() -> None:
    given = set(inspect.signature(AutoscalingContext.__init__).parameters)
    read = {*Context.__annotations__, "total_num_requests", "config"}
    assert read <= given
    assert "target_ongoing_requests" in _fields("AutoscalingConfig")


def test_serve_makes_one_instance_of_a_policy_class_for_an_application() -> None:
    from ray.serve._private import autoscaling_state
    from ray.serve.config import AutoscalingPolicy
    from ray.serve.schema import ServeApplicationSchema

    assert "autoscaling_policy" in ServeApplicationSchema.model_fields
    path = f"{ArbiterPolicy.__module__}:{ArbiterPolicy.__name__}"
    policy = AutoscalingPolicy(
        policy_function=path, policy_kwargs={"capability": "chat", "follow": False}
    )
    makers = [
        f
        for name, f in vars(autoscaling_state).items()
        if callable(f) and "instantiate" in (inspect.getdoc(f) or "").lower()
    ]
    made = [maker(policy) for maker in makers if len(inspect.signature(maker).parameters) == 1]
    assert any(isinstance(one, ArbiterPolicy) for one in made)


@pytest.mark.spec("M2")
def test_serve_says_who_deployed_an_application_and_how_it_is_scaled() -> None:
    """By which the front knows what it has deployed (deployments.front.capability_apps)."""
    from ray.serve.config import AutoscalingConfig
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ApplicationDetails, DeploymentDetails

    assert _get_global_client(raise_if_no_controller_running=False) is None
    assert {"source", "deployments"} <= ApplicationDetails.model_fields.keys()
    assert "deployment_config" in DeploymentDetails.model_fields
    given = {"max_replicas": 2, "policy": {"policy_function": SCALING, "policy_kwargs": {"a": 1}}}
    assert given.items() <= AutoscalingConfig(**given).model_dump().items()


@pytest.mark.spec("N1")
def test_a_handle_of_serve_reports_by_the_function_that_is_made_quiet() -> None:
    """Looked up when the task that reports is begun, which is after the handle was made."""
    begun = inspect.getsource(RouterMetricsManager.update_deployment_config)
    assert "self.push_autoscaling_metrics_to_controller," in begun
    for name in ("push_autoscaling_metrics_to_controller", "_add_autoscaling_metrics_point"):
        assert list(inspect.signature(getattr(RouterMetricsManager, name)).parameters) == ["self"]
    made = inspect.getsource(RouterMetricsManager.__init__)
    for field in ("num_queued_requests", "num_requests_sent_to_replicas"):
        assert f"self.{field}" in made
    for router in (CurrentLoopRouter, SingletonThreadRouter):
        assert "self._asyncio_router =" in inspect.getsource(router.__init__)
    assert "self._metrics_manager =" in inspect.getsource(AsyncioRouter.__init__)


@pytest.mark.spec("H0")
async def test_controller_of_serve_reads_its_interval_before_each_wait() -> None:
    loop = inspect.getsource(ServeController.run_control_loop)
    assert "await asyncio.sleep(CONTROL_LOOP_INTERVAL_S)" in loop
    assert "self._controller_handle =" in inspect.getsource(RouterMetricsManager.__init__)
    by_variable = controller.CONTROL_LOOP_INTERVAL_S
    pace = ray_internals.ControlPace()
    pace.quicken()
    assert ray_internals.SOON_S == controller.CONTROL_LOOP_INTERVAL_S < by_variable
    assert await eventually(
        lambda: by_variable == controller.CONTROL_LOOP_INTERVAL_S, ray_internals.SOON_FOR_S + 10
    )


@pytest.mark.spec("J8")
def test_serve_router_notes_a_request_until_a_replica_has_taken_it() -> None:
    """In the task of the call, whose context names the request."""
    noted = inspect.getsource(AsyncioRouter.assign_request)
    where = [noted.index(part) for part in ("_add_request_pending", "route_and_send_request")]
    assert where == sorted(where) and "assign_request_task.add_done_callback" in noted
    named = inspect.getsource(HTTPProxy.setup_request_context_and_handle)
    assert '"_internal_request_id": internal_request_id' in named
    context = contextvars.copy_context()
    assert not ray_internals.waits_for_replica(context)
    context.run(
        serve_context._serve_request_context.set,
        serve_context._RequestContext(_internal_request_id="one"),
    )
    assert not ray_internals.waits_for_replica(context)
    serve_context._add_request_pending_assignment("one", "its response", None)
    assert ray_internals.waits_for_replica(context)
    serve_context._remove_request_pending_assignment("one", "its response")
    assert not ray_internals.waits_for_replica(context)


@pytest.mark.spec("J8", "L3")
async def test_a_proxy_of_serve_can_be_found_and_keeps_its_server_where_it_is_looked_for(
    probe: Any,
) -> None:
    begun = inspect.getsource(proxy)
    assert "self._start_http_server_task = event_loop.create_task(\n" in begun
    returned = inspect.signature(http_util.start_asgi_http_server).return_annotation
    assert str(returned).endswith("Tuple[_asyncio.Task, uvicorn.server.Server]")
    assert "format_actor_name(SERVE_PROXY_NAME, node_id)" in inspect.getsource(proxy_state)
    assert await probe.__ray_call__.remote(lambda actor: os.getpid()) != os.getpid()
    config = uvicorn.Config(PlainTextResponse("as Serve gives it"), log_config=None)
    config.load()
    assert isinstance(config.loaded_app, ProxyHeadersMiddleware)


@pytest.mark.spec("J8")
def test_controller_of_serve_starts_each_proxy_in_one_place_with_its_options() -> None:
    held = inspect.getsource(ServeController.__init__)
    assert "self.proxy_state_manager = ProxyStateManager(" in held
    in_all = inspect.getsource(proxy_state.ProxyStateManager)
    assert in_all.count("self._actor_proxy_wrapper_class(") == 1
    assert "self._actor_proxy_wrapper_class(" in inspect.getsource(
        proxy_state.ProxyStateManager._start_proxy
    )
    start = inspect.getsource(proxy_state.ProxyStateManager._start_proxy)
    assert "http_options = http_options or self._http_options" in start
    begun = inspect.getsource(proxy.ProxyActor.__ray_metadata__.modified_class.__init__)
    assert "configure_http_middlewares(http_options)" in begun


def test_a_draining_proxy_of_serve_waits_for_requests_that_are_counted_for_it() -> None:
    proxy = object.__new__(HTTPProxy)
    proxy._ongoing_requests, proxy._draining_start_time = 0, 0.0  # since long ago
    proxy._should_emit_request_ingress_metrics = lambda: False
    assert proxy.is_drained()
    with ray_internals.counted_by_proxy(RequestIdMiddleware(proxy)):  # as Serve wraps it
        assert not proxy.is_drained()
    assert proxy.is_drained()


@pytest.mark.spec("J8")
def test_proxy_of_serve_knows_the_deployment_at_a_path() -> None:
    deployed = DeploymentID(name="other", app_name="app")
    handle: Any = MagicMock()
    handle.deployment_id = deployed
    router = ProxyRouter(lambda *_: handle)
    router.update_routes({deployed: EndpointInfo(route="/other")})
    proxy = object.__new__(HTTPProxy)
    proxy.proxy_router = router
    behind = RequestIdMiddleware(proxy)  # as Serve wraps it
    assert ray_internals.deployment_at(behind, "/other/health") == "other"
    assert ray_internals.deployment_at(behind, "/others") is None
    assert "self.proxy_router = proxy_router" in inspect.getsource(GenericProxy.__init__)


@pytest.mark.spec("L3")
def test_proxy_of_serve_fails_on_each_header_that_is_looked_at_before_it() -> None:
    def read(name: bytes) -> None:
        """As the proxy does with a request, but for tracing."""
        headers, proxy = [(name, b"\xff"), (b"x-request-id", b"1")], object.__new__(HTTPProxy)
        request: Any = SimpleNamespace(headers=headers, client=None)
        proxy.setup_request_context_and_handle("", MagicMock(), "/", request, "")
        http_util.parse_request_timeout_header(dict(headers), None)
        http_util.parse_disconnect_disabled_header(dict(headers))

    read(b"x-other")
    names = ray_internals.headers_of_proxy() - {b"traceparent"}
    for name in names | {b"serve_multiplexed_model_id", b"x_session_id"}:
        with pytest.raises(UnicodeDecodeError):
            read(name)


@pytest.mark.spec("G3")
def test_serve_router_interface_matches_resident_router() -> None:
    from ray.serve._private.constants import REQUEST_ROUTING_STATS_METHOD
    from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

    for name, ours in vars(ResidentRouter).items():
        if inspect.isfunction(ours) and name != "_state_of":
            theirs = inspect.signature(getattr(RequestRouter, name)).parameters
            mine = inspect.signature(ours).parameters
            is_open = any(p.kind is p.VAR_KEYWORD for p in theirs.values())
            assert is_open or len(mine) == len(theirs), name
    assert {"args", "metadata", "routing_context", "future", "created_at"} <= set(
        PendingRequest.__annotations__
    )
    for read in ("routing_stats", "max_ongoing_requests", "replica_id", "node_id"):
        assert isinstance(inspect.getattr_static(RunningReplica, read), property), read
    assert inspect.iscoroutinefunction(RequestRouter.choose_replicas)
    assert "replica_queue_len_cache" in vars(RequestRouter)
    assert hasattr(Capability, REQUEST_ROUTING_STATS_METHOD)


def _fields(name: str) -> set[str]:
    from ray.serve import config

    return set(getattr(config, name).model_fields)
