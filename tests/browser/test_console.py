"""Each view of the console in a real Chromium, before a front whose arbiter is scripted."""

import json
import time
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from deployments import messages
from deployments.config.fields import parse_size
from deployments.front.access.keys import Scope
from tests.browser.conftest import VIEWS, WITHIN_MS, Tab, eventually, watched
from tests.support.arbiter_states import Books, size
from tests.support.console_front import ConsoleFront, listening, table_of

GPU = "n1/gpu:0"
PHONE = {"width": 390, "height": 844}


def fill(front: ConsoleFront) -> Books:
    """Something for every view."""
    books = front.arbiter.books
    books.foreign[GPU] = {"blender": 50}
    books.holds("talk", 300)
    books.leases("train", 100)
    books.waits("next", 900, priority="normal")
    front.arbiter.tell("model_load", "talk", time.time(), size_bytes=size(300), took_s=2.0)
    return books


@pytest.mark.spec("K4")
def test_memory_shows_who_holds_what_and_each_change_with_its_reason(
    tab: Tab, front: ConsoleFront
) -> None:
    books = front.arbiter.books
    books.foreign[GPU] = {"blender": 50}
    books.holds("talk", 300)
    page = tab.open()
    device = page.get_by_role("region", name=GPU, exact=True)
    parts = page.get_by_role("region", name=f"Parts of {GPU}")
    expect(parts).to_contain_text("talk")
    expect(parts).to_contain_text("blender")
    expect(device.locator("dl")).to_contain_text("300.0 MiB")
    books.leaves("talk")
    books.holds("next", 600)
    front.arbiter.tell("model_unload", "talk", time.time(), reason="swap", to="gone")
    front.arbiter.tell("model_load", "next", time.time())
    expect(parts).to_contain_text("next")
    expect(parts).not_to_contain_text("talk")
    over = device.locator(".u-over")
    expect(over).to_be_visible()  # the chart is drawn anew with each new model
    box = over.bounding_box()
    assert box is not None
    over.hover(position={"x": box["width"] - 1, "y": 20})
    expect(device.locator(".readout")).to_contain_text("next granted 600.0 MiB next-1")
    expect(device.locator(".readout")).to_contain_text("talk leaves: swap")


@pytest.mark.spec("K4")
def test_title_tells_free_bytes_and_one_line_that_nothing_needs_attention(
    tab: Tab, front: ConsoleFront
) -> None:
    front.arbiter.books.holds("talk", 300)
    page = tab.open()
    expect(page.get_by_text("Nothing needs attention.")).to_be_visible()
    expect(page).to_have_title("700.0 MiB free")
    calm = page.locator("#icon").get_attribute("href")
    front.arbiter.books.waits("next", 900, expected_s=12.0, left_s=9.0)
    front.arbiter.tell("ticket_queued", "next", position=1, attempt=1, priority="normal")
    expect(page.get_by_text("after its deadline in 9 s")).to_be_visible()
    expect(page).to_have_title("700.0 MiB free · 1 alert")
    assert page.locator("#icon").get_attribute("href") != calm


@pytest.mark.spec("K4")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_is_accessible_and_fits_a_phone(
    browser: Browser, front: ConsoleFront, scheme: str
) -> None:
    fill(front)
    for viewport in (PHONE, {"width": 1280, "height": 900}):
        context = browser.new_context(viewport=viewport, color_scheme=scheme)  # type: ignore[arg-type]
        tab = watched(context, front.url)
        for view in VIEWS:
            page = tab.open(view)
            expect(page.get_by_role("navigation").locator("[aria-current]")).to_have_count(1)
            found = Axe().run(page)
            assert found.violations_count == 0, (view, scheme, found.generate_report())
            wide = page.evaluate("document.documentElement.scrollWidth > innerWidth")
            assert not wide, f"{view} is wider than {viewport['width']} pixels"
        context.close()
        assert (tab.errors, tab.elsewhere) == ([], [])


@pytest.mark.spec("K4")
def test_an_act_shows_what_would_go_and_asks_for_a_key_that_may(
    tab: Tab, front: ConsoleFront
) -> None:
    """Without a key the plan is shown, and nothing is done."""
    fill(front)
    page = tab.open("models")
    page.get_by_role("button", name="Load draw").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Yes, after evicting:")
    expect(dialog.get_by_role("region", name="What would go")).to_contain_text("talk")
    assert front.arbiter.asked == []
    dialog.get_by_role("button", name="Load it").click()
    expect(dialog.get_by_role("alert")).to_contain_text("needs an API key")
    assert front.arbiter.asked == []
    dialog.get_by_label("API key").fill(front.owner_key)
    dialog.get_by_role("button", name="Use it").click()
    expect(dialog).to_contain_text("It is asked for.")
    assert front.arbiter.asked == [("load", "chat", "draw")]
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


@pytest.mark.spec("K4", "L1")
def test_a_key_without_the_scope_sees_and_does_not_act(tab: Tab, front: ConsoleFront) -> None:
    fill(front)
    viewer = front.key(Scope.VIEW)  # from now on seeing needs a key as well
    page = tab.page
    page.goto(tab.url)
    page.get_by_label("API key").fill(viewer)
    page.get_by_role("button", name="Use it").click()
    page.goto(f"{tab.url}/#queue")
    page.get_by_role("button", name="Cancel next-1").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Cancel it").click()
    expect(dialog.get_by_role("alert")).to_contain_text("lacks the scope `admin`")
    assert front.arbiter.asked == []


@pytest.mark.spec("K4")
def test_each_act_is_done_after_its_dialog(tab: Tab, front: ConsoleFront) -> None:
    fill(front)
    front.arbiter.answers["free"] = {"plan": {}, "lease": {"state": "held"}}
    tab.page.goto(tab.url)
    tab.page.evaluate("key => sessionStorage.setItem('key', key)", front.owner_key)
    for view, button, shows, act in [
        ("models", "Unload talk", "300.0 MiB come back", "Unload it"),
        ("queue", "Raise to high next", "after evicting", "Raise it"),
        ("queue", "Cancel next-1", "are refused", "Cancel it"),
        ("leases", "Drain train", "give 100.0 MiB back", "Give notice"),
        ("leases", "Free…", "talk (talk-1) leaves", "Free it"),
    ]:
        page = tab.open(view)
        page.get_by_role("button", name=button).click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text(shows)
        dialog.get_by_role("button", name=act).click()
        expect(dialog.get_by_role("button", name="Close")).to_be_visible()
        expect(dialog.get_by_role("alert")).to_have_count(0)
        dialog.get_by_role("button", name="Close").click()
    page = tab.open("models")
    page.get_by_label("Floor of talk").select_option("host")
    page.get_by_role("button", name="Set host").click()
    expect(page.get_by_role("dialog")).to_contain_text("Its floor is host.")
    done = [call[:2] for call in front.arbiter.asked]
    assert [name for name, *_ in done] == [
        "unload", "raise_priority", "cancel", "unload", "free", "set_floor"
    ]  # fmt: skip
    assert done[0] == ("unload", "talk-1") and done[3] == ("unload", "train-1")


class Jobs:
    """In place of the process that keeps them: its only job is `batch-1`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    async def call(self, method: str, job: str) -> dict[str, str]:
        self.calls.append((method, job))
        return {"id": job, "state": "cancelling"}


@pytest.mark.spec("K4", "J4")
def test_jobs_move_on_and_are_cancelled_after_a_dialog(
    tab: Tab, front: ConsoleFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    books, jobs = fill(front), Jobs()
    monkeypatch.setattr(front.state, "jobs", jobs)
    books.works("batch-0", 7, 7, state="completed")
    books.works("batch-1", 2, 7)
    page = tab.open("queue")
    row = page.get_by_role("region", name="Jobs").get_by_role("row").filter(has_text="batch-1")
    expect(row).to_contain_text("2 of 7")
    books.works("batch-1", 5, 7)
    expect(row).to_contain_text("5 of 7")  # without an event
    expect(page.get_by_role("button", name="Cancel batch-0")).to_have_count(0)
    page.evaluate("key => sessionStorage.setItem('key', key)", front.owner_key)
    row.get_by_role("button", name="Cancel batch-1").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("2 of 7 get no answer")
    assert jobs.calls == []
    dialog.get_by_role("button", name="Cancel it").click()
    expect(dialog).to_contain_text("It is cancelling.")
    assert jobs.calls == [("cancel_any", "batch-1")]


@pytest.mark.spec("K4", "K3")
def test_a_click_on_an_eviction_opens_explain(tab: Tab, front: ConsoleFront) -> None:
    fill(front)
    front.arbiter.tell("eviction", "talk", time.time(), reason="swap", waiting="next-1")
    page = tab.open("events")
    row = (
        page.get_by_role("region", name="Events")
        .get_by_role("row")
        .filter(has_text="asked to leave (swap)")
    )
    row.get_by_role("button", name="talk-1").click()
    expect(page.get_by_role("dialog")).to_contain_text("300.0 MiB were missing on n1/gpu:0")
    page.keyboard.press("Escape")
    page.get_by_label("Filter events").fill("loaded")
    expect(page.get_by_text("asked to leave")).to_have_count(0)
    expect(page.get_by_text("talk has loaded, 300.0 MiB, 2.00 s")).to_be_visible()


@pytest.mark.spec("K4", "K3")
def test_can_i_answers_by_the_dry_run_and_a_refusal_says_why(tab: Tab, front: ConsoleFront) -> None:
    page = tab.open("ask")
    page.get_by_label("Model").fill("draw")
    page.get_by_role("button", name="Can I?").click()
    expect(page.get_by_text("Yes, after evicting:")).to_be_visible()
    page.get_by_label("Model").fill("nothing")
    page.get_by_role("button", name="Can I?").click()
    expect(page.get_by_role("alert")).to_contain_text("nothing")


@pytest.mark.spec("K4", "A18")
def test_an_open_tab_lives_through_the_death_of_the_arbiter(tab: Tab, front: ConsoleFront) -> None:
    fill(front)
    page = tab.open()
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    front.arbiter.is_away = True
    expect(page.get_by_text("arbiter away")).to_be_visible()
    expect(page.get_by_text("No arbiter has answered since")).to_be_visible()
    books = front.arbiter.books
    books.epoch, books.sequence = 2, 2_000_000
    books.leaves("talk")
    front.arbiter.tell("arbiter_started", holders=1)
    front.arbiter.is_away = False
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    expect(page.get_by_text("epoch 2")).to_be_visible()
    expect(page.get_by_role("region", name=f"Parts of {GPU}")).not_to_contain_text("talk")
    page.goto(f"{tab.url}/#events")
    expect(page.get_by_text("talk has loaded")).to_be_visible()  # what was known stays


@pytest.mark.spec("K4")
def test_hidden_tabs_hold_no_subscription_and_visible_ones_share_one(
    browser: Browser, front: ConsoleFront
) -> None:
    context = browser.new_context()
    front.arbiter.books.holds("talk", 300)
    tabs = [watched(context, front.url) for _ in range(4)]
    for tab in tabs:
        tab.open()
        expect(tab.page.get_by_text("Nothing needs attention.")).to_be_visible()
    assert front.state.viewing.viewers_count == 4
    assert front.arbiter.waiting <= 1
    for tab in tabs:
        hide(tab.page, True)
    eventually(lambda: front.state.viewing.viewers_count == 0 and front.arbiter.waiting == 0)
    before = front.arbiter.calls.copy()
    front.arbiter.books.holds("next", 100)
    front.arbiter.tell("model_load", "next", time.time())
    expect(tabs[0].page.get_by_role("region", name=f"Parts of {GPU}")).to_contain_text("talk")
    assert front.arbiter.calls == before
    hide(tabs[0].page, False)
    expect(tabs[0].page.get_by_role("region", name=f"Parts of {GPU}")).to_contain_text("next")
    context.close()


def hide(page: Page, is_hidden: bool) -> None:
    """As Chromium tells a page; a headless tab is never behind another one."""
    page.evaluate(
        """hidden => {
            Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        is_hidden,
    )


@pytest.mark.spec("K4")
def test_500_models_and_10_000_adapters_are_found_by_name(browser: Browser, tmp_path: Path) -> None:
    names = ["talk", *(f"model-{number:03}" for number in range(499))]
    with listening(tmp_path, table_of(tmp_path, names, adapters=10_000)) as front:
        front.arbiter.books.has_adapters("talk", hot=8, images=200)
        front.arbiter.books.holds("model-321", 300)
        context = browser.new_context()
        tab = watched(context, front.url)
        page = tab.open("models")
        expect(page.get_by_text("500 of 500 models")).to_be_visible()
        rows = page.get_by_role("region", name="Models", exact=True).get_by_role("row")
        expect(rows).to_have_count(61)
        expect(rows.nth(1)).to_contain_text("model-321")
        expect(page.get_by_text("8 hot, 192 warm, 9800 cold")).to_have_count(0)  # beyond the first
        page.get_by_role("button", name="Show 440 more").click()
        expect(rows).to_have_count(501)
        expect(page.get_by_text("8 hot, 192 warm, 9800 cold")).to_be_visible()
        page.keyboard.press("/")
        page.keyboard.type("law-09")
        expect(page.get_by_text("50 of 1000")).to_be_visible()
        expect(page.get_by_text("talk:law-09000")).to_be_visible()
        context.close()
        assert (tab.errors, tab.elsewhere) == ([], [])


@pytest.mark.spec("K4")
def test_each_listed_adapter_has_its_tier_and_the_hot_ones_are_first(
    tab: Tab, front: ConsoleFront
) -> None:
    """Without an engine all are cold, unless the pool has images of which no engine is there to
    tell."""
    page = tab.open("models?law")
    rows = page.get_by_role("listitem").filter(has_text="talk:law-")
    expect(rows).to_have_count(30)
    expect(rows.filter(has_text="cold")).to_have_count(30)
    assert front.arbiter.calls[messages.ADAPTERS] == 0, "no engine is asked that is not there"
    front.arbiter.books.holds("talk", 300)
    front.arbiter.books.has_adapters("talk", hot=1, images=2)
    front.arbiter.tiers |= {f"talk:law-{number:05}": "cold" for number in range(30)}
    front.arbiter.tiers |= {"talk:law-00020": "hot", "talk:law-00003": "warm"}
    front.arbiter.tell("model_load", "talk")
    expect(rows.nth(0)).to_have_text("talk:law-00020 hot", timeout=WITHIN_MS)  # asked each 5 s
    expect(rows.nth(1)).to_have_text("talk:law-00003 warm")
    expect(rows.filter(has_text="cold")).to_have_count(28)
    front.arbiter.books.leaves("talk")
    front.arbiter.tell("model_unload", "talk")
    expect(rows.nth(0)).to_have_text("talk:law-00000 ", timeout=WITHIN_MS)
    expect(page.locator(".names .tag")).to_have_count(0)


@pytest.mark.spec("E1", "K4")
def test_pool_lists_slabs_and_shared_copies_with_who_uses_them(
    tab: Tab, front: ConsoleFront
) -> None:
    front.arbiter.books.has_adapters("talk", hot=0, images=2)
    front.arbiter.books.has_copy("draw", users=("draw-1", "draw-2"))
    rows = tab.open("leases").get_by_role("region", name="Slabs").get_by_role("row")
    expect(rows.filter(has_text="adapter")).to_contain_text("idle")
    copy = rows.filter(has_text="copy-1")
    for told in ("weights", "chat/draw", "draw-1, draw-2", "c0ffee", "90.0 MiB"):
        expect(copy).to_contain_text(told)


@pytest.mark.spec("K4")
def test_the_page_runs_no_inline_script_and_asks_no_other_site(
    tab: Tab, front: ConsoleFront
) -> None:
    page = tab.open()
    page.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "window.hostile = 1";
            document.body.append(script);
        }"""
    )
    assert page.evaluate("window.hostile") is None
    refused = [said for said in tab.errors if "Content Security Policy" in said]
    assert len(refused) == 1
    assert tab.errors == refused
    tab.errors.clear()


@pytest.mark.spec("K4")
def test_views_are_reached_by_keys(tab: Tab, front: ConsoleFront) -> None:
    page = tab.open()
    page.keyboard.press("4")
    expect(page.get_by_label("Filter events")).to_be_visible()
    page.keyboard.press("/")
    expect(page.get_by_label("Filter events")).to_be_focused()


@pytest.mark.spec("K4", "C12")
def test_settings_show_bytes_with_a_unit_that_the_configuration_takes(
    tab: Tab, front: ConsoleFront
) -> None:
    odd = 3 * 2**30 + 1
    arenas = {"cpu": parse_size("1.6 GiB"), "host": odd}
    front.arbiter.table = {"arbiter": {"arenas": arenas, "lease_term_most_s": 2_000_000}}
    page = tab.open("settings")
    expect(page.get_by_label("gpu_margin", exact=True)).to_have_value('"512 MiB"')
    expect(page.get_by_label("lease_term_most_s", exact=True)).to_have_value("2000000")
    shown = json.loads(page.get_by_label("arenas", exact=True).input_value())
    assert shown["cpu"] == "1.6 GiB" and shown["gpu"] is None
    assert shown["host"].endswith(" MiB") and parse_size(shown["host"]) == odd


@pytest.mark.spec("K4")
def test_a_phone_shows_every_view_in_the_bar_and_no_label_without_a_value(
    browser: Browser, front: ConsoleFront
) -> None:
    fill(front)
    context = browser.new_context(viewport=PHONE)
    tab = watched(context, front.url)
    page = tab.open("models")
    links = page.get_by_role("navigation").get_by_role("link")
    expect(links).to_have_count(len(VIEWS))
    for link in links.all():
        expect(link).to_be_in_viewport(ratio=1)
    row = page.get_by_role("row").filter(has_text="left")
    expect(row.locator("td[data-head=state]")).to_be_visible()
    expect(row.locator("td[data-head=held]")).to_be_hidden()  # it is cold
    context.close()


@pytest.mark.spec("K4", "C12")
def test_a_setting_is_changed_after_both_values_were_shown(tab: Tab, front: ConsoleFront) -> None:
    fill(front)
    tab.page.goto(tab.url)
    tab.page.evaluate("key => sessionStorage.setItem('key', key)", front.owner_key)
    page = tab.open("settings")
    expect(page.get_by_text("Generation 1.")).to_be_visible()
    page.get_by_label("evict", exact=True).fill('"priority_lru"')
    page.get_by_label("evict", exact=True).press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("priority_lru")
    assert front.arbiter.calls["change_settings"] == 0
    dialog.get_by_role("button", name="Change it").click()
    expect(dialog).to_contain_text("It is changed.")
    assert front.arbiter.calls["change_settings"] == 1
