"""A core whose every metric has a value, and the series of a scrape."""

from dataclasses import replace

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.histogram import SECONDS_BOUNDS, Histogram
from arbiter.core.settings import TenantLimits
from arbiter.metrics.counters import Counters
from arbiter.metrics.samples import JobTotal, Source, samples_of
from arbiter.metrics.series import Samples
from arbiter.replay.score import ReplayedDay, Score
from arbiter.units import Bytes, Content, HolderId, Span, TicketId, seconds
from tests.support.core_driver import HOST, NODE, PLAIN, CoreDriver, gib
from tests.support.core_queries import CPU

NOTHING = Score(0, 0, 0, 0, 0, 0, Bytes(0), Span(0), Span(0))
DAY = ReplayedDay(
    seconds(3_600),
    {
        "chosen": replace(NOTHING, loading=seconds(30), waited=seconds(40), moved_bytes=gib(3)),
        "lru": replace(NOTHING, loading=seconds(36)),
        "belady": replace(NOTHING, loading=seconds(12)),
    },
)
STALLED = 0.02  # too little to count as pressure
SECRETS = ("ticket-", "holder-", "request-", "adapter-", "client-", "slab-")


def scrape(
    driver: CoreDriver,
    counters: Counters,
    calls_count: int = 0,
    jobs: tuple[JobTotal, ...] = (),
) -> Samples:
    """What the arbiter answers, with what the core has told since counted."""
    for told in driver.logged:
        counters.note(told)
    driver.logged.clear()
    core = driver.arbiter
    view, names = driver.snapshot(), core.model_names
    source = Source(view, counters, names, core.request_times, calls_count, DAY, jobs)
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
    return ev.ContentReading(
        Content.ADAPTER, gib(1), **counts, load=seconds(2), restore=seconds(1), hot_hits_count=9
    )


def busy_core() -> CoreDriver:
    """One of everything: loads, an eviction, a wake, a wait, a refusal, a failure, leases, and at
    the end a queue. Its ids all begin as SECRETS do."""
    limits = TenantLimits("default", most_bytes=gib(500))
    settings = replace(PLAIN, tenants=(limits,))
    driver = CoreDriver(device=80, host=100, settings=settings, holders=("holder-1",))
    evict_and_wake(driver)
    end_leases(driver)
    load_twice(driver)
    driver.ask(60, "ticket-huge", 500, holder="holder-1", model="c")
    driver.ask(61, "ticket-c", 1, holder="holder-1", model="c")
    driver.at(62, ev.LoadBroke(TicketId("ticket-c"), "bad weights", False))
    pushed = ev.PressurePushed("n", types.Level.LOW, None, seconds(1))
    driver.at(63, pushed)
    run = ev.FinishedRequest(TicketId("ticket-a"), "adapter-1", seconds(2), "answered", "request-1")
    usage = (ev.Usage(types.Client("default", "client-1"), 1),)
    times = (request_times("answered", 0.2, 2.0), request_times("left", 400.0))
    held = (driver.held("ticket-a", model="a", inflight=2),)
    driver.at(64, ev.Renewed(HolderId("holder-1"), held, (run,), 1, usage, times))
    driver.ask(65, "ticket-d", 70, holder="holder-1", model="d", deadline_s=600)
    read_pool(driver)
    return driver


def evict_and_wake(driver: CoreDriver) -> None:
    """`a` sleeps for `b`, and `b` ends for `a`, which wakes."""
    driver.resident(0, "ticket-a", 60, holder="holder-1", model="a", host=20)
    driver.engines["ticket-a"] = {CPU: 60}
    for second in range(1, 5):
        driver.read(second)
    driver.ask(20, "ticket-b", 60, holder="holder-1", model="b")
    driver.at(21, ev.Slept(TicketId("ticket-a")))
    driver.engines["ticket-a"] = {CPU: 1, HOST: 20}
    driver.read(22)
    driver.at(24, ev.Loaded(TicketId("ticket-b"), seconds(2)))
    driver.beat(25, "ticket-b", holder="holder-1")
    driver.ask(40, "ticket-a", 60, holder="holder-1", model="a", host=20)
    driver.at(41, ev.Released(TicketId("ticket-b"), "swap"))
    driver.gone(42, "ticket-b")
    driver.at(44, ev.Loaded(TicketId("ticket-a"), seconds(2)))
    driver.beat(45, "ticket-a", holder="holder-1")


def load_twice(driver: CoreDriver) -> None:
    """The second time it is known how long `e` takes."""
    for at, name in ((54, "ticket-e1"), (57, "ticket-e2")):
        driver.ask(at, name, 5, holder="holder-1", model="e")
        driver.at(at + 1, ev.Loaded(TicketId(name), seconds(1)))
        driver.engines[name] = {CPU: 4}
        for count in range(1, 5):
            driver.read(at + 1 + count / 10)
        driver.at(at + 1.5, ev.Released(TicketId(name), "manual"))
        driver.gone(at + 2, name)


def end_leases(driver: CoreDriver) -> None:
    """One holds, one has ended."""
    for at, name in ((50, "ticket-l1"), (51, "ticket-l2")):
        driver.lease(at, name, 2)
        driver.at(at + 0.5, ev.Loaded(TicketId(name), Span(0)))
    driver.at(52, ev.Released(TicketId("ticket-l2"), "released"))
    driver.gone(53, "ticket-l2")


def read_pool(driver: CoreDriver) -> None:
    reading = ev.DeviceReading(CPU, gib(20), Bytes(0))
    measured = ev.Measured(NODE, (reading,), (), STALLED, slabs=(_slab(),), contents=(_pool(),))
    driver.at(66, measured)
