"""Ticket, engine process, measured bytes: the riskiest seam, end to end."""

from typing import Any

import pytest

from tests.support.live_arbiter import capability, live_arbiter, model

pytestmark = pytest.mark.usefixtures("cluster")


def measured_bytes(ticket: dict[str, Any]) -> int:
    """By the last reading, which may be from the middle of the load."""
    return sum(ticket["measured_bytes"].values())


@pytest.mark.spec("A3", "A5", "B1")
async def test_a_call_loads_its_model_and_the_books_show_what_the_kernel_measured() -> None:
    async with live_arbiter({"chat": capability(a=model(100))}) as d:
        h = d.holder()
        assert await h.ask.remote("a") == 200
        state = await d.until(lambda s: any(measured_bytes(t) > 95 << 20 for t in s["tickets"]))
        (ticket,) = state["tickets"]
        assert ticket["state"] == "resident"
        await d.books_are_true()
