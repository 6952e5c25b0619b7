"""What a handle of Serve tells the controller, once it is made quiet."""

from types import SimpleNamespace
from typing import Any

import pytest

from arbiter.protocol import ray_internals


class Metrics:
    """The part of Serve's manager that is used: it counts at times, and reports what it counted."""

    def __init__(self) -> None:
        self.num_queued_requests = 0
        self.num_requests_sent_to_replicas: dict[str, int] = {}
        self.counted = 0
        self.reports: list[int] = []
        self.asked = 0  # the controller, to look sooner
        call = SimpleNamespace(remote=self._ask)
        self._controller_handle = SimpleNamespace(__ray_call__=call)

    def _ask(self, function: Any) -> None:
        self.asked += 1

    def _add_autoscaling_metrics_point(self) -> None:
        self.counted = self.num_queued_requests + sum(self.num_requests_sent_to_replicas.values())

    def push_autoscaling_metrics_to_controller(self) -> None:
        self.reports.append(self.counted)


@pytest.fixture
def metrics() -> Metrics:
    made = Metrics()
    router: Any = SimpleNamespace(_asyncio_router=SimpleNamespace(_metrics_manager=made))
    ray_internals.quiet_when_idle(SimpleNamespace(_router=router))
    return made


@pytest.mark.spec("N1")
def test_an_idle_handle_reports_one_time_in_ten(metrics: Metrics) -> None:
    for _ in range(40):
        metrics.push_autoscaling_metrics_to_controller()
    assert metrics.reports == [0] * (ray_internals.IDLE_REPORTS + 4)


@pytest.mark.spec("N1")
def test_a_request_is_in_the_report_that_it_sets_off(metrics: Metrics) -> None:
    for _ in range(8):
        metrics.push_autoscaling_metrics_to_controller()
    metrics.num_queued_requests = 1
    metrics.push_autoscaling_metrics_to_controller()
    metrics.num_queued_requests, metrics.num_requests_sent_to_replicas["r"] = 0, 2
    metrics.push_autoscaling_metrics_to_controller()
    metrics.num_requests_sent_to_replicas["r"] = 0
    for _ in range(4):
        metrics.push_autoscaling_metrics_to_controller()
    assert metrics.reports == [0] * 4 + [1, 2] + [0] * 4


@pytest.mark.spec("H0")
def test_a_handle_whose_requests_all_wait_asks_the_controller_to_look_sooner(
    metrics: Metrics,
) -> None:
    metrics.push_autoscaling_metrics_to_controller()
    metrics.num_queued_requests, metrics.num_requests_sent_to_replicas["r"] = 1, 1
    metrics.push_autoscaling_metrics_to_controller()
    assert metrics.asked == 0
    metrics.num_requests_sent_to_replicas["r"] = 0
    for _ in range(ray_internals.WAITING_REPORTS + 5):
        metrics.push_autoscaling_metrics_to_controller()
    assert metrics.asked == ray_internals.WAITING_REPORTS, "not for ever"
    metrics.num_queued_requests = 0
    metrics.push_autoscaling_metrics_to_controller()
    metrics.num_queued_requests = 1
    metrics.push_autoscaling_metrics_to_controller()
    assert metrics.asked == ray_internals.WAITING_REPORTS + 1
