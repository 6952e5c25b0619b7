"""A core whose every metric has a value, and the series of a scrape."""

from dataclasses import replace

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.histogram import SECONDS_BOUNDS, Histogram
from arbiter.metrics.counters import Counters
from arbiter.metrics.samples import Samples, Source, samples_of
from arbiter.units import Bytes, Content, HolderId, NodeId, Span, TicketId, seconds
from tests.support.core_driver import CPU, NODE, PLAIN, CoreDriver, gib

SECRETS = ("ticket-", "holder-", "request-", "adapter-", "client-", "slab-")


def scrape(driver: CoreDriver, counters: Counters, calls_count: int = 0) -> Samples:
    """What the arbiter answers, with what the core has told since counted."""
    for told in driver.told:
        counters.note(told)
    driver.told.clear()
    core = driver.arbiter
    source = Source(
        driver.snapshot(), counters, core.model_names, core.request_times, calls_count
    )
    return samples_of(source)


def series_of(samples: Samples) -> set[tuple[str, tuple[str, ...]]]:
    """Name and labels of each."""
    return {(name, labels) for name, rows in samples.items() for labels in rows}


def request_times(outcome: str, *took_s: float) -> ev.RequestTimes:
    taken = Histogram(SECONDS_BOUNDS)
    for each in took_s:
        taken.note(each)
    return ev.RequestTimes(outcome, taken.read())


def _slab() -> ev.SlabReading:
    return ev.SlabReading(
        "slab-1", Content.ADAPTER, "text/a", "adapter-1", TicketId("ticket-a"), gib(1), gib(2),
        rows_count=3, hits_count=4, misses_count=5, stored_count=6, evicted_count=7,
        refused_count=8, hot_count=2,
    )  # fmt: skip


def _pool() -> ev.ContentReading:
    counts = dict.fromkeys(
        ("rows_count", "hits_count", "misses_count", "stored_count", "evicted_count",
         "refused_count", "restored_count", "saves_count"),
        3,
    )  # fmt: skip
    return ev.ContentReading(Content.ADAPTER, gib(1), **counts, load=seconds(2), restore=seconds(1))


def busy_core() -> CoreDriver:
    """One of everything: a load, an eviction, a wait, a refusal, a wake, a failure, a lease."""
    limits = types.TenantLimits("acme", gib(50), gib(0))
    driver = CoreDriver(device=80, settings=replace(PLAIN, tenants=(limits,)), holders=())
    driver.join(0, "holder-1")
    return driver
