"""How many replicas Serve keeps of each capability: an autoscaling policy that follows the arbiter,
and the requests alone where there is no arbiter.

The front deploys each capability with a CapabilityPolicy; an application that serve_config.yaml has
itself names ArbiterPolicy by `autoscaling_policy.policy_function`. Serve makes one in its
controller and calls it each 0.1 s, so a call must not wait: a thread keeps the numbers fresh.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from arbiter.client.admin import arbiter_handle
from arbiter.errors import ActorAbsent
from arbiter.protocol import ray_internals
from arbiter.protocol.messages import Plain

POLL_S = 20.0  # of one long poll; the arbiter answers early when a number changes
ANSWER_S = 10.0  # beyond the poll's own end; then the arbiter is away
AGAIN_S = 0.5  # between tries while there is none
DEFAULT_TO_ZERO_S = 300.0  # H0's default, of a capability whose table no arbiter has told yet
FEWER_AFTER_S = 30.0  # Serve's look-back: load below it for this long is not a pause between bursts


STARTS_WITHIN_S = 10.0  # what takes longer, or fails again and again, is not waited for so closely


class Context(Protocol):
    """The part of Serve's AutoscalingContext that is read here."""

    deployment_name: str
    current_num_replicas: int
    capacity_adjusted_max_replicas: int

    @property
    def total_num_requests(self) -> float: ...

    @property
    def config(self) -> Any: ...


class ArbiterPolicy:
    """One application's policy. `wanted`: the capability's replicas, as the arbiter says; None:
    there is no arbiter. `to_zero_s`: how long an idle replica is kept then, which is the
    `downscale_to_zero_s` of the table that the last arbiter had."""

    def __init__(
        self,
        capability: str,
        follow: bool = True,
        clock: Callable[[], float] = time.monotonic,
        quicken: Callable[[], None] | None = None,
    ) -> None:
        self.wanted: int | None = None
        self.to_zero_s = DEFAULT_TO_ZERO_S
        self._capability, self._clock = capability, clock
        self._busy_at = self._most_at = clock()
        self._most = 0
        self._is_to_follow = follow
        self._quicken = quicken or ray_internals.PACE.quicken
        self._short_since = math.inf

    def __call__(self, contexts: Mapping[Any, Context]) -> tuple[dict[Any, int], dict[Any, Any]]:
        """Answers Serve's question for each deployment."""
        return {key: self.replicas(context) for key, context in contexts.items()}, {}

    def replicas(self, context: Context) -> int:
        """Returns the number of replicas: at least one for any request, whatever the arbiter says;
        zero only when it agrees. The first call starts the thread that follows the arbiter:
        `arbiter check` makes policies too, where there is no cluster to follow."""
        if self._is_to_follow:
            self._is_to_follow = False
            threading.Thread(target=self._follow, name="arbiter-policy", daemon=True).start()
        count, now = by_requests(context), self._clock()
        if count:
            self._busy_at = now
        least = self.wanted
        if least is None:
            least = int(context.current_num_replicas > 0 and now - self._busy_at < self.to_zero_s)
        replicas = max(least, min(count, 1), self._several(count, now))
        is_short = replicas > context.current_num_replicas
        self._short_since = min(self._short_since, now) if is_short else math.inf
        if now - self._short_since < STARTS_WITHIN_S and is_short:
            self._quicken()
        return replicas

    def _several(self, count: int, now: float) -> int:
        """More than one replica, by the highest demand of the last half minute; else 0."""
        if count >= self._most or now - self._most_at > FEWER_AFTER_S:
            self._most, self._most_at = count, now
        return self._most if self._most > 1 else 0

    def _follow(self) -> None:
        """Polls the arbiter for as long as the controller lives."""
        version = -1
        while True:
            try:
                arbiter = arbiter_handle()
                answer = arbiter.replicas.remote(version, POLL_S)
                version, count = ray.get(answer, timeout=POLL_S + ANSWER_S)
                self.wanted = count.get(self._capability, 0)
                self.note_table(ray.get(arbiter.table.remote(), timeout=ANSWER_S))
            except (RayError, ActorAbsent):
                version, self.wanted = -1, None
                time.sleep(AGAIN_S)

    def note_table(self, table: Plain) -> None:
        """Keeps what holds when the arbiter has gone."""
        row = table.get("capabilities", {}).get(self._capability, {})
        self.to_zero_s = float(row.get("downscale_to_zero_s", DEFAULT_TO_ZERO_S))


class CapabilityPolicy:
    """The same for one deployment, as Serve wants it there. `class_path` and `digest`: of
    what is deployed; the front reads them back to see whether that is as the table has it."""

    def __init__(self, capability: str, class_path: str = "", digest: str = "") -> None:
        self._policy = ArbiterPolicy(capability)

    def __call__(self, context: Context) -> tuple[int, dict[str, Any]]:
        return self._policy.replicas(context), {}


def by_requests(context: Context) -> int:
    """One replica for any request, more where one has too many at once."""
    target: float = context.config.target_ongoing_requests if context.config else 1.0
    count = math.ceil(context.total_num_requests / max(target, 1.0))
    return min(count, context.capacity_adjusted_max_replicas)
