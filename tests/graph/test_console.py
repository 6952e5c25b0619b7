"""The console in a real Chromium, before the running system."""

import os
import signal
import urllib.error
from collections.abc import Iterator

import pytest
from openai import OpenAI
from playwright.sync_api import Browser, Page, expect

from tests.browser import conftest as browsers
from tests.browser.conftest import VIEWS, Tab, watched
from tests.graph.conftest import Graph, until
from tests.support.graph_commands import send
from tests.support.graph_processes import victims

HELLO = [{"role": "user", "content": "Who holds the memory?"}]
LARGE, EMBEDDING = "small-chat", "all-minilm-l6-v2"
browser = browsers.browser  # the fixture
WITHIN_MS = 60_000  # a load on a busy machine


@pytest.fixture
def tab(graph: Graph, browser: Browser) -> Iterator[Tab]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    made = watched(context, graph.url)
    yield made
    context.close()
    assert (made.errors, made.elsewhere) == ([], [])


@pytest.mark.spec("K4", "A18")
def test_console_shows_models_that_trade_memory_and_lives_through_the_arbiters_death(
    graph: Graph, client: OpenAI, tab: Tab
) -> None:
    device = next(d["device"] for d in graph.state()["devices"] if d["kind"] == "cpu")
    page = tab.open("memory")
    parts = page.get_by_role("region", name=f"Parts of {device}")
    client.embeddings.create(model=EMBEDDING, input="Who holds the memory?")
    expect(parts).to_contain_text(EMBEDDING, timeout=WITHIN_MS)
    client.chat.completions.create(model=LARGE, messages=HELLO, max_tokens=2)  # type: ignore[arg-type]
    expect(parts).to_contain_text(LARGE, timeout=WITHIN_MS)
    expect(parts).not_to_contain_text(EMBEDDING, timeout=WITHIN_MS)
    for view in VIEWS:
        tab.open(view)
    page = tab.open("events")
    loaded = page.get_by_role("row").filter(has_text=f"{LARGE} has loaded")
    expect(loaded.first).to_be_visible()
    loaded.first.get_by_role("button").click()
    expect(page.get_by_role("dialog")).to_contain_text(LARGE)
    page.keyboard.press("Escape")
    epoch = graph.state()["epoch"]
    (pid,) = victims(graph, "arbiter")
    os.kill(pid, signal.SIGKILL)
    later = until(lambda: epoch_after(graph, epoch), 60, "another life of the arbiter has begun")
    expect(page.get_by_text(f"epoch {later}")).to_be_visible(timeout=WITHIN_MS)
    expect(page.get_by_text("live", exact=True)).to_be_visible(timeout=WITHIN_MS)
    client.embeddings.create(model=EMBEDDING, input="And now?")
    expect(page.get_by_role("region", name="Events")).to_contain_text(EMBEDDING, timeout=WITHIN_MS)


def epoch_after(graph: Graph, before: int) -> int | None:
    try:
        epoch = int(graph.state()["epoch"])
    except urllib.error.HTTPError as error:  # there is none now
        error.close()
        return None
    return epoch if epoch != before else None


@pytest.mark.spec("K4")
def test_a_model_is_loaded_from_the_console_with_the_owners_key(graph: Graph, tab: Tab) -> None:
    """The plan of the real core is shown first; without a key nothing happens."""
    until(lambda: graph.state()["is_settled"], 60, "the arbiter has its holders back")
    page = tab.open("models?tiny-chat")
    page.get_by_role("button", name="Load tiny-chat", exact=True).click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("tiny-chat needs")
    dialog.get_by_role("button", name="Load it").click()
    key = (graph.folder / "admin.key").read_text().strip()
    dialog.get_by_label("API key").fill(key)
    dialog.get_by_role("button", name="Use it").click()
    expect(dialog).to_contain_text("It is asked for.")
    page.keyboard.press("Escape")
    row = page.get_by_role("row").filter(has_text="tiny-chat")
    expect(row).to_contain_text("resident", timeout=WITHIN_MS)


@pytest.mark.spec("K4")
def test_models_and_leases_are_steered_from_the_console_after_their_victims_are_shown(
    graph: Graph, client: OpenAI, tab: Tab
) -> None:
    client.embeddings.create(model=EMBEDDING, input="Who holds the memory?")
    page = tab.open("models")
    key = (graph.folder / "admin.key").read_text().strip()
    page.evaluate("key => sessionStorage.setItem('key', key)", key)
    [ticket] = [t["ticket"] for t in graph.state()["tickets"] if t["model"] == EMBEDDING]
    act(page, f"Unload {EMBEDDING}", f"{ticket} would leave", "Unload it", "Asked to leave")
    until(lambda: ticket not in tickets(graph), 60, "it has left")

    page = tab.open("events")
    left = page.get_by_role("row").filter(has_text="asked to leave (manual)").first
    left.get_by_role("button", name=ticket).click()
    expect(page.get_by_role("dialog")).to_contain_text(EMBEDDING)

    page = tab.open(f"models?{EMBEDDING}")
    for floor, shows in (("device", f"{EMBEDDING} needs"), ("cold", "It may leave.")):
        page.get_by_label(f"Floor of {EMBEDDING}").select_option(floor)
        confirm(page, shows, f"Set {floor}", f"Its floor is {floor}.")
        assert floors(graph).get(EMBEDDING, "cold") == floor

    held = send(graph, "POST", "/arbiter/free", {"gb": 0.001, "term_s": 300})
    lease = held["lease"]["ticket"]
    page = tab.open("leases")
    act(
        page,
        "Drain hold",
        "give 1.0 MiB back",
        "Give notice",
        "It has its notice.",
    )
    until(lambda: lease not in tickets(graph), 60, "its notice is over")


def act(page: Page, button: str, shows: str, done_by: str, then: str) -> None:
    page.get_by_role("button", name=button, exact=True).click()
    confirm(page, shows, done_by, then)


def confirm(page: Page, shows: str, done_by: str, then: str) -> None:
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(shows)
    dialog.get_by_role("button", name=done_by).click()
    expect(dialog).to_contain_text(then)
    page.keyboard.press("Escape")


def tickets(graph: Graph) -> set[str]:
    return {t["ticket"] for t in graph.state()["tickets"]}


def floors(graph: Graph) -> dict[str, str]:
    return {row["model"]: row["floor"] for row in graph.state()["floors"]}
