"""A model replaced on disk under its name, on a real cluster."""

from pathlib import Path

import pytest

from tests.support.live_arbiter import capability, live_arbiter, model

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.mark.spec("D5")
async def test_a_model_replaced_on_disk_is_loaded_anew_awake_or_asleep(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"old")
    both = {
        "chat": capability(a=model(200) | {"source": str(tmp_path)}),
        "other": capability(b=model(200)),
    }
    async with live_arbiter(both) as d:
        chat, other = d.holder("chat"), d.holder("other")
        assert await chat.ask.remote("a") == 200
        [first] = await d.engines()
        weights.write_bytes(b"new")
        assert await chat.ask.remote("a") == 200
        assert len(await d.events("model_load")) == 2, "the next request is not the old engine's"
        await d.until(lambda s: first not in {t["ticket"] for t in s["tickets"]})
        assert await other.ask.remote("b") == 200
        await d.until(lambda s: any(t["state"] == "asleep" for t in s["tickets"]))
        weights.write_bytes(b"newer")
        assert await chat.ask.remote("a") == 200
        assert len(await d.events("model_load")) == 4 and not await d.events("model_wake")
        await d.books_are_true()
