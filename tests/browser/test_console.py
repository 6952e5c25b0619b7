"""Each view of the console in a real Chromium, before a front whose arbiter is scripted."""

import time

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Tab
from tests.support.console_front import ConsoleFront

GPU = "n1/gpu:0"


@pytest.mark.spec("K4")
def test_memory_shows_who_holds_what_and_each_change_with_its_reason(
    tab: Tab, front: ConsoleFront
) -> None:
    books = front.arbiter.books
    books.foreign[GPU] = {"blender": 50}
    books.holds("talk", 300)
    page = tab.open()
    device = page.get_by_role("region", name=GPU, exact=True)
    parts = device.get_by_role("region", name=f"Parts of {GPU}")
    expect(parts).to_contain_text("talk")
    expect(parts).to_contain_text("blender")
    expect(device.locator("dl")).to_contain_text("300.0 MiB")
    books.leaves("talk")
    books.holds("next", 600)
    front.arbiter.tell("model_unload", "talk", time.time(), reason="swap", to="gone")
    front.arbiter.tell("model_load", "next", time.time())
    expect(parts).to_contain_text("next")
    expect(parts).not_to_contain_text("talk")
    expect(page.locator("canvas").first).to_be_visible()


@pytest.mark.spec("K4")
@pytest.mark.parametrize(
    "view", ["memory", "models", "queue", "events", "leases", "settings", "ask"]
)
def test_every_view_opens(tab: Tab, front: ConsoleFront, view: str) -> None:
    books = front.arbiter.books
    books.holds("talk", 300)
    books.leases("train", 100)
    books.waits("next", 900, priority="normal")
    front.arbiter.tell("model_load", "talk", time.time())
    page = tab.open(view)
    expect(page.get_by_role("navigation").locator("[aria-current]")).to_have_count(1)
