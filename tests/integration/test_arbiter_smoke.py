"""Ticket, engine process, measured bytes: the riskiest seam, end to end."""

import pytest

from tests.support.desk import capability, desk, model

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.mark.spec("A3", "A5", "B1")
async def test_a_call_loads_its_model_and_the_books_show_what_the_kernel_measured() -> None:
    async with desk({"chat": capability(a=model(100))}) as d:
        h = d.holder()
        assert await h.ask.remote("a") == 200
        state = await d.until(lambda s: s["tickets"] and s["tickets"][0]["measured_bytes"])
        (ticket,) = state["tickets"]
        assert ticket["state"] == "resident"
        assert sum(ticket["measured_bytes"].values()) > 95 << 20
        await d.books_are_true()
