"""A real Chromium. Where there is none, these tests are skipped, unless CONSOLE_BROWSER=required,
which CI sets."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.support.console_front import ConsoleFront, listening, table_of
from tests.support.waits import pauses

WITHIN_MS = 60_000  # for anything that must appear
expect.set_options(timeout=WITHIN_MS)
VIEWS = ["memory", "models", "queue", "events", "leases", "settings", "ask"]
MODELS = ["talk", "next", "left", "draw"]
# The sandbox needs a user namespace, which containers do not have; the console is our own page.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]


def eventually(holds: Callable[[], bool], within_s: float = 60.0) -> None:
    """Waits for what no page shows."""
    ends, pause_s = time.monotonic() + within_s, pauses(0.01, 0.1)
    while not holds():
        assert time.monotonic() < ends, f"it does not hold after {within_s} s"
        threading.Event().wait(next(pause_s))


def chromium() -> str | None:
    """Its path: what CONSOLE_CHROMIUM names, else the system's."""
    named = os.environ.get("CONSOLE_CHROMIUM", "")
    return named or shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")  # while it runs, no test of the process may be asynchronous
def browser() -> Iterator[Browser]:
    path = chromium()
    if path is None:
        why = "no chromium here: `apt-get install chromium`, or name one by CONSOLE_CHROMIUM"
        assert os.environ.get("CONSOLE_BROWSER") != "required", why
        pytest.skip(why)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield running
        running.close()


@dataclass
class Tab:
    """One tab, and what went wrong in it."""

    page: Page
    url: str
    errors: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)  # requests to other sites

    def open(self, view: str = "") -> Page:
        self.page.goto(f"{self.url}/#{view}")
        self.page.wait_for_selector(".attention")
        return self.page


def watched(context: BrowserContext, url: str) -> Tab:
    tab = Tab(context.new_page(), url)
    tab.page.set_default_timeout(WITHIN_MS)
    tab.page.on("console", lambda said: _console(tab, said))
    tab.page.on("pageerror", lambda error: tab.errors.append(str(error)))
    tab.page.on("request", lambda request: _request(tab, request.url))
    return tab


def _console(tab: Tab, said: Any) -> None:
    """Chromium also logs each answer above 399; a test of refusals expects those."""
    if said.type in ("error", "warning") and "Failed to load resource" not in said.text:
        tab.errors.append(said.text)


def _request(tab: Tab, address: str) -> None:
    if not address.startswith((tab.url, "data:")):
        tab.elsewhere.append(address)


@pytest.fixture
def tab(browser: Browser, front: ConsoleFront) -> Iterator[Tab]:
    """A tab whose console must stay empty and which must ask no other site."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    made = watched(context, front.url)
    yield made
    context.close()
    assert (made.errors, made.elsewhere) == ([], [])


@pytest.fixture
def front(tmp_path: Path) -> Iterator[ConsoleFront]:
    with listening(tmp_path, table_of(tmp_path, MODELS, adapters=30)) as running:
        yield running
