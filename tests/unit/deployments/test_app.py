"""What the builders of applications do besides."""

import pytest
import ray

from deployments import app
from deployments.config.config_file import FrontArgs
from deployments.front.plain_proxies import PlainProxies


@pytest.mark.spec("J8")
async def test_front_is_built_where_a_loop_runs_as_in_a_notebook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrapped = []

    async def wrap(proxies: PlainProxies) -> None:
        wrapped.append(proxies)

    monkeypatch.setattr(PlainProxies, "wrap", wrap)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    app.front(FrontArgs())
    assert len(wrapped) == 1
