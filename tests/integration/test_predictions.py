"""How many seconds a load will take, before it was ever seen (A17, A21)."""

import pytest

from arbiter.errors import DeadlineUnmet
from tests.support.live_arbiter import capability, live_arbiter, model

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.mark.spec("A17", "A21")
async def test_first_load_is_predicted_from_the_bandwidth_that_smaller_models_showed() -> None:
    """50 MiB more take as many seconds again as 50 MiB more took before."""
    sizes = {"a": (50, 0), "b": (100, 2), "c": (150, 0)}
    models = {name: model(mib, load_seconds=took) for name, (mib, took) in sizes.items()}
    async with live_arbiter({"chat": capability(**models)}) as d:
        h = d.holder()
        assert await h.ask.remote("a") == await h.ask.remote("b") == 200
        took_s = {e["model"]: e["took_s"] for e in await d.events("model_load")}
        assert took_s["b"] > took_s["a"]
        line_s = pytest.approx(2 * took_s["b"] - took_s["a"], rel=0.01)
        with pytest.raises(DeadlineUnmet) as caught:
            await h.ask.remote("c", deadline_s=2)
        assert caught.value.cause.predicted_s == line_s
        assert "c" not in await d.states()
        assert await h.ask.remote("c", deadline_s=60) == 200
        [load] = [e for e in await d.events("model_load") if e["model"] == "c"]
        assert load["predicted_ns"] / 1e9 == line_s
