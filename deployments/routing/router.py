"""The request router of every capability: the one module that touches Serve's router classes.

Named in deployments.app. Serve makes one in each process that calls a capability (the front), tells
it the replicas and what each says of itself (`Capability.record_routing_stats`, asked for once a
second), and asks it for an order for each call; deployments.routing.rank decides that. Calls of a
handle that carry no `InferenceCall` are routed by queue alone.
"""

import time
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from arbiter.protocol.messages import node_of
from deployments import messages
from deployments.routing.pieces import Kept, split
from deployments.routing.rank import ReplicaState, RouteRequest, RoutingHistory, rank

ANYTHING = RouteRequest("", "")


def request_of(args: Sequence[Any]) -> RouteRequest:
    """What a call asks for, by its first argument."""
    call = args[0] if args else None
    if not isinstance(call, messages.InferenceCall):
        return ANYTHING
    key = f"{call.tenant}/{call.key}" if call.key else ""
    served = call.served or call.model
    return RouteRequest(
        call.model,
        served,
        key,
        split(call.pieces),
        call.refused_nodes,
        call.tenant,
        call.kv_stays_s,
    )


class ResidentRouter(RequestRouter):  # type: ignore[misc]  # Ray ships no types
    """Prefers the resident model, then the adapter, the key, the prompt, the fewest requests."""

    # Serve's 0.1 s is less than a busy machine holds a process up for, and a call that gives up a
    # replica for its silence has another one load the model, which takes seconds.
    queue_len_response_deadline_s = 0.5

    def initialize_state(self) -> None:
        """Called by Serve before anything else is."""
        self._history = RoutingHistory()
        self._waiting: dict[int, PendingRequest] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Gives each replica a rank of its own, so that Serve takes the first with room."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # this order is all there is
        request, now_s = request_of(pending_request.args), time.time()
        by_id = {one.replica_id.unique_id: one for one in candidate_replicas}
        states = [self._state_of(key, one, request, now_s) for key, one in by_id.items()]
        sent = self._history.sent(request.model, now_s)
        sticky = self._history.sticky(request, now_s)
        order = rank(request, states, sticky=sticky, sent=sent)
        self._history.chosen(request, order[0], now_s)  # others come before it is sent
        return [[by_id[key]] for key in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, _: Any) -> None:
        """Notes where the call went in the end: the first choice may have had no room. Its engine
        may have it by now, so what it was sent is as old as the call."""
        request, came_s = request_of(pending_request.args), pending_request.created_at
        self._history.chosen(request, replica_id.unique_id, time.time(), came_s)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._history.keep({one.replica_id.unique_id for one in replicas})
        for one in replicas:
            key, stats = one.replica_id.unique_id, one.routing_stats
            kept = {model: Kept(**times) for model, times in stats.get("kept", {}).items()}
            self._history.seen.told(key, stats.get("models", ()), kept)

    def _state_of(
        self, key: str, one: RunningReplica, request: RouteRequest, now_s: float
    ) -> ReplicaState:
        queue = self.replica_queue_len_cache.get(one.replica_id) or 0
        stats = one.routing_stats
        return ReplicaState(
            key,
            queue,
            queue >= one.max_ongoing_requests,
            stats.get("models", {}),
            stats.get("adapters", ()),
            self._history.share(request, key, now_s),
            node_of(one.node_id or ""),
        )

    # Serve finds a waiting call by its request's id, which all concurrent calls of one request
    # share: of two only the first would ever be sent. So they are told apart by their own metadata.

    def _add_pending_request_to_indices(self, pending_request: PendingRequest) -> None:
        self._waiting[id(pending_request.metadata)] = pending_request

    def _remove_pending_request_from_indices(self, pending_request: PendingRequest) -> None:
        self._waiting.pop(id(pending_request.metadata), None)

    def _get_pending_request_matching_internal_request_id(
        self, request_metadata: Any = None
    ) -> PendingRequest | None:
        found = self._waiting.get(id(request_metadata))
        return found if found is not None and not found.future.done() else None
