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
from deployments.routing.pieces import KeptKv, split
from deployments.routing.rank import ReplicaState, RouteRequest, RoutingHistory, rank

NO_CALL = RouteRequest("", "")


def request_of(args: Sequence[Any]) -> RouteRequest:
    """What routing needs to know of a call, by its first argument; NO_CALL where that is no
    InferenceCall."""
    call = args[0] if args else None
    if not isinstance(call, messages.InferenceCall):
        return NO_CALL
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

    # On a busy machine a process may be held up for longer than Serve's 0.1 s. A call that passes
    # over a replica because it did not answer has another one load the model, which takes seconds.
    queue_len_response_deadline_s = 0.5

    def initialize_state(self) -> None:
        """Called by Serve before anything else is."""
        self._history = RoutingHistory()
        self._pending_calls: dict[int, PendingRequest] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Gives each replica a rank of its own, so that Serve takes the first with room."""
        if pending_request is None:
            return [candidate_replicas]
        # Serve backs off where every replica of this order is full, as there is no other order.
        pending_request.routing_context.should_backoff = True
        request, now_s = request_of(pending_request.args), time.time()
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        states = [self._state_of(name, r, request, now_s) for name, r in by_id.items()]
        followed = self._history.followed(request.model, now_s)
        sticky = self._history.sticky(request, now_s)
        order = rank(request, states, sticky=sticky, followed=followed)
        # Noted here already, because other calls are ranked before Serve has sent this one.
        self._history.note_sent(request, order[0], now_s)
        return [[by_id[name]] for name in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, _: Any) -> None:
        """Notes to which replica the call went, as the first of the order may have had no room. The
        prompt counts as sent when the call was made, because its engine may have it already."""
        request, came_s = request_of(pending_request.args), pending_request.created_at
        self._history.note_sent(request, replica_id.unique_id, time.time(), came_s)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._history.forget_others({replica.replica_id.unique_id for replica in replicas})
        for replica in replicas:
            name, stats = replica.replica_id.unique_id, replica.routing_stats
            kept = {model: KeptKv(**times) for model, times in stats.get("kept", {}).items()}
            self._history.seen.update(name, stats.get("models", ()), kept)

    def _state_of(
        self, name: str, replica: RunningReplica, request: RouteRequest, now_s: float
    ) -> ReplicaState:
        queue_count = self.replica_queue_len_cache.get(replica.replica_id) or 0
        stats = replica.routing_stats
        return ReplicaState(
            name,
            queue_count,
            queue_count >= replica.max_ongoing_requests,
            stats.get("models", {}),
            stats.get("adapters", ()),
            self._history.share(request, name, now_s),
            node_of(replica.node_id or ""),
        )

    # Serve finds a waiting call by the id of its HTTP request, which all concurrent calls of one
    # request share, so that of two calls only the first would ever be sent. The three methods below
    # find it by the identity of its metadata.

    def _add_pending_request_to_indices(self, pending_request: PendingRequest) -> None:
        self._pending_calls[id(pending_request.metadata)] = pending_request

    def _remove_pending_request_from_indices(self, pending_request: PendingRequest) -> None:
        self._pending_calls.pop(id(pending_request.metadata), None)

    def _get_pending_request_matching_internal_request_id(
        self, request_metadata: Any = None
    ) -> PendingRequest | None:
        pending = self._pending_calls.get(id(request_metadata))
        return pending if pending is not None and not pending.future.done() else None
