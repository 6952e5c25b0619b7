"""How soon the console is there, and how soon it shows what happens (K4), in a real Chromium.

    python -m benchmarks.console [--samples 20]

The front is the real one, its arbiter is scripted: 500 models, 10,000 adapters, no Ray. Each paint
is of a browser context without a cache.
"""

import argparse
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from benchmarks import report
from tests.browser.conftest import FLAGS, chromium
from tests.support.console_front import ConsoleFront, listening, table_of

MODELS, ADAPTERS = 500, 10_000
PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
SHOWN = "name => [...document.querySelectorAll('td')].some((td) => td.textContent === name)"


def painted_ms(browser: Browser, front: ConsoleFront) -> float:
    context = browser.new_context()
    page = context.new_page()
    page.goto(front.url)
    handle = page.wait_for_function(PAINT)
    took_ms = float(handle.json_value())
    context.close()
    return took_ms


def shown_ms(browser: Browser, front: ConsoleFront, samples: int) -> list[float]:
    """From the event at the arbiter until its model is in the table of parts."""
    page = browser.new_context().new_page()
    page.goto(front.url)
    page.wait_for_selector(".scroll")
    took = []
    for number in range(samples):
        name = f"model-{number:03}"
        page.wait_for_timeout(1_000)  # the one before is over, and a poll is open
        front.arbiter.books.holds(name, 1)
        began = time.perf_counter()
        front.arbiter.tell("model_load", name, time.time())
        page.wait_for_function(SHOWN, arg=name)
        took.append((time.perf_counter() - began) * 1e3)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=20)
    samples = parser.parse_args().samples
    names = [f"model-{number:03}" for number in range(MODELS)]
    with (
        tempfile.TemporaryDirectory() as folder,
        listening(Path(folder), table_of(Path(folder), names, ADAPTERS)) as front,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        paint = report.Sample(tuple(painted_ms(browser, front) for _ in range(samples)))
        shown = report.Sample(tuple(shown_ms(browser, front, samples)))
        browser.close()
    for name, sample in (("first paint", paint), ("from event to screen", shown)):
        print(f"{name}: {sample} ms, at most {max(sample.values):.0f}", flush=True)
    figures = {"paint_ms": paint.as_dict(), "shown_ms": shown.as_dict()}
    report.write("console", figures, seed=None)


if __name__ == "__main__":
    main()
