"""What is told to Ray about an actor's calls."""

import pytest

from arbiter.protocol import ray_internals


@pytest.mark.spec("C7")
def test_full_queue_leaves_actor_concurrency_for_requests_to_be_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_internals, "on_node", lambda node: node)
    assert ray_internals.detached("n", "a", "s", 60_000)["max_concurrency"] >= 60_000 + 10_000
