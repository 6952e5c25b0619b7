"""What a scrape says of a scripted core, and that its series stay as many."""

from collections.abc import Iterator

import pytest

from arbiter.core import events as ev
from arbiter.core.decisions import EventKind, LogEvent
from arbiter.core.histogram import HistogramCounts, Sum
from arbiter.metrics.counters import KNOWN, Counters
from arbiter.metrics.series import Labels, Samples, Value, from_plain, to_plain
from arbiter.metrics.table import FRONT, TABLE
from arbiter.units import GIB, TicketId, seconds
from tests.support.core_driver import CPU, CoreDriver, capability
from tests.support.metrics import SECRETS, STALLED, busy_core, request_times, scrape, series_of

CPU_LABELS = ("n", CPU)


@pytest.fixture(scope="module")
def samples() -> Samples:
    counters = Counters()
    whose = {"remote": "cloud", "tenant": "ann"}
    counters.note(LogEvent(EventKind.REMOTE_EGRESS, whose))
    end = {"outcome": "answered", "prompt_tokens": 7, "answer_tokens": 4, "sent_bytes": 50}
    counters.note(LogEvent(EventKind.REMOTE_ANSWER, whose | end | {"money": 0.25}))
    return scrape(busy_core(), counters, calls_count=7)


@pytest.mark.spec("K2")
def test_every_metric_of_the_table_has_a_series(samples: Samples) -> None:
    assert samples.keys() == TABLE.keys()
    of_the_front = {metric.name for metric in FRONT}
    assert {name for name, rows in samples.items() if not rows} == of_the_front


@pytest.mark.spec("K2")
def test_every_series_has_the_labels_of_its_metric(samples: Samples) -> None:
    for name, labels in series_of(samples):
        assert len(labels) == len(TABLE[name].labels), name


@pytest.mark.spec("K2")
def test_no_label_holds_the_id_of_what_comes_and_goes(samples: Samples) -> None:
    values = {value for _, labels in series_of(samples) for value in labels}
    assert not [value for value in values if value.startswith(SECRETS)]
    assert "a" in values


@pytest.mark.spec("K2")
def test_states_of_a_device_sum_up_to_its_budget(samples: Samples) -> None:
    states = {
        labels[2]: value
        for labels, value in samples["arbiter_device_state_bytes"].items()
        if labels[:2] == CPU_LABELS and isinstance(value, int | float)
    }
    assert sum(states.values()) == samples["arbiter_device_budget_bytes"][CPU_LABELS]
    assert states["resident"] + states["draining"] == 62 * GIB
    assert (
        samples["arbiter_device_granted_bytes"][CPU_LABELS] == 63 * GIB
    )  # the load that failed among it


def above_zero(rows: dict[Labels, Value]) -> dict[Labels, Value]:
    return {labels: value for labels, value in rows.items() if value}


@pytest.mark.spec("K2")
def test_counters_tell_what_happened(samples: Samples) -> None:
    assert above_zero(samples["arbiter_evictions_total"]) == {("swap",): 3}
    assert above_zero(samples["arbiter_reload_seconds_total"]) == {("text",): 2.0}  # of the wake
    assert samples["arbiter_tickets_refused_total"][("never_fits",)] == 1
    assert above_zero(samples["arbiter_load_failures_total"]) == {("text",): 1}
    assert above_zero(samples["arbiter_leases_ended_total"]).keys() == {("manual",)}
    assert samples["arbiter_pressure_changes_total"][("low", "pushed")] == 2  # of two devices
    assert samples["arbiter_events_total"][("eviction",)] == 3
    assert samples["arbiter_events_total"][("quarantine",)] == 0
    assert samples["arbiter_calls_total"] == {(): 7}
    assert samples["arbiter_remote_answers_total"] == {("cloud", "answered"): 1}
    assert samples["arbiter_remote_tokens_total"] == {("cloud", "ann"): 11}
    assert samples["arbiter_remote_sent_bytes_total"] == {("cloud", "ann"): 50}
    assert samples["arbiter_remote_money_total"] == {("cloud", "ann"): 0.25}


@pytest.mark.spec("K2")
def test_what_can_be_counted_has_a_value_before_its_first_event() -> None:
    driver = CoreDriver(holders=())
    driver.at(0, ev.CapabilitiesSet((capability("text", "text", ("a",)),)))
    found = scrape(driver, Counters())
    for name, labels in KNOWN.items():
        assert set(found[name]) >= {(label,) for label in labels}
    assert found["arbiter_load_failures_total"] == {("text",): 0}
    assert found["arbiter_load_seconds"] == {("text",): HistogramCounts((0,) * 11, Sum(0.0))}
    assert found["arbiter_tickets_refused_total"][("deadline_unmet",)] == 0


@pytest.mark.spec("K2")
def test_replays_of_the_day_are_shown_by_policy(samples: Samples) -> None:
    assert samples["arbiter_replay_span_seconds"] == {(): 3_600.0}
    loading = {("chosen",): 30.0, ("lru",): 36.0, ("belady",): 12.0}
    assert samples["arbiter_replay_loading_seconds"] == loading
    assert samples["arbiter_replay_moved_bytes"][("chosen",)] == 3 * GIB


@pytest.mark.spec("K2")
def test_requests_are_counted_by_the_time_they_took(samples: Samples) -> None:
    answered = samples["arbiter_request_seconds"][("text", "answered")]
    assert answered == HistogramCounts((0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0), Sum(2.2))
    left = samples["arbiter_request_seconds"][("text", "left")]
    assert left == HistogramCounts((0,) * 10 + (1,), Sum(400.0))


@pytest.mark.spec("K2")
def test_queue_and_models_are_shown_as_they_are(samples: Samples) -> None:
    assert samples["arbiter_queued_tickets"][("text",)] == 1
    assert samples["arbiter_queue_deadline_seconds"][()] == 599.0
    assert samples["arbiter_queue_oldest_seconds"][()] == 1.0
    assert samples["arbiter_model_state"][("text", "d")] == 1
    assert samples["arbiter_model_state"][("text", "large")] == 0
    assert samples["arbiter_leases"][()] == 1
    assert samples["arbiter_pool_hot_rows"] == {("n", "adapter"): 2}
    assert samples["arbiter_pool_hot_hits_total"] == {("n", "adapter"): 9}
    assert samples["arbiter_node_stalled_ratio"] == {("n",): STALLED}


@pytest.mark.spec("K2")
def test_values_survive_the_way_to_the_front(samples: Samples) -> None:
    assert from_plain(to_plain(samples)) == samples
    assert from_plain({**to_plain(samples), "arbiter_unknown": [[[], 1]]}) == samples


# -- over restarts ---------------------------------------------------------------------------------

MODELS = tuple(f"m{number}" for number in range(500))


def lives(driver: CoreDriver, counters: Counters, epoch: int) -> Iterator[Samples]:
    """Replicas and tickets of other names in each life; one of 500 models is loaded, used, and lost
    with its holder."""
    driver.at(0, ev.CapabilitiesSet((capability("text", "text", MODELS),)))
    for life in range(2):
        holder, ticket = f"holder-{epoch}-{life}", f"ticket-{epoch}-{life}"
        at = 10.0 * life
        driver.join(at + 1, holder)
        driver.ask(at + 2, ticket, 30, holder=holder, model=MODELS[epoch])
        driver.at(at + 3, ev.Loaded(TicketId(ticket), seconds(1)))
        times = (request_times("answered", 1.0),)
        held = (driver.held(ticket, model=MODELS[epoch], t=at + 4),)
        driver.at(at + 4, ev.Renewed(driver.find(ticket).holder, held, request_times=times))  # type: ignore[union-attr]
        yield scrape(driver, counters)
        driver.at(at + 5, ev.HolderLost(driver.find(ticket).holder))  # type: ignore[union-attr]
        driver.gone(at + 6, ticket)
        yield scrape(driver, counters)


@pytest.mark.spec("K2")
def test_series_stay_as_many_over_100_restarts_with_500_models() -> None:
    """Of the arbiter, 100 times, and of a replica and its model twice in each life."""
    seen: set[tuple[str, tuple[str, ...]]] = set()
    counts = []
    for epoch in range(100):
        counters = Counters()
        for samples in lives(CoreDriver(holders=()), counters, epoch):
            seen |= series_of(samples)
        counts.append(len(seen))
    assert counts[0] == counts[-1]
    assert len([labels for name, labels in seen if name == "arbiter_model_state"]) == 500
    assert counts[0] < 2_000
