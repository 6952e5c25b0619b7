"""The page of metrics: Prometheus reads it, and the arbiter is asked once for it."""

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as families_of

from arbiter.core.histogram import HistogramCounts
from arbiter.errors import ArbiterUnavailable
from arbiter.metrics.counters import Counters
from arbiter.metrics.series import Samples, to_plain
from arbiter.metrics.table import AGE, TABLE, UP
from deployments.front.status.metrics_page import FRESH_S, MetricsPage, exposition
from tests.support.metrics import SECRETS, busy_core, scrape


@pytest.fixture(scope="module")
def samples() -> Samples:
    return scrape(busy_core(), Counters())


def values(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families_of(text.decode())
        for sample in family.samples
    }


class Arbiter:
    """Answers with the samples, or is away."""

    def __init__(self, samples: Samples) -> None:
        self.samples, self.is_up, self.asked = samples, True, 0
        self.now_s = 0.0
        self.page = MetricsPage(self.ask, lambda: self.now_s)

    async def ask(self) -> dict[str, Any]:
        self.asked += 1
        await asyncio.sleep(0)
        if not self.is_up:
            raise ArbiterUnavailable(1.0)
        return to_plain(self.samples)


@pytest.mark.spec("K2")
def test_prometheus_reads_every_metric_with_its_type_unit_and_help(samples: Samples) -> None:
    text = exposition({**samples, UP: {(): 1}, AGE: {(): 0}})
    names = {family.name: family for family in families_of(text.decode())}
    assert names.keys() == {name.removesuffix("_total") for name in TABLE}
    for name, metric in TABLE.items():
        family = names[name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind.value, metric.help)
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == set(metric.labels)
            assert not [v for v in sample.labels.values() if v.startswith(SECRETS)]


@pytest.mark.spec("K2")
def test_values_of_the_page_are_those_of_the_arbiter(samples: Samples) -> None:
    found = values(exposition(samples))
    for name, rows in samples.items():
        for labels, value in rows.items():
            named = frozenset(zip(TABLE[name].labels, labels, strict=True))
            if isinstance(value, HistogramCounts):
                assert found[f"{name}_sum", named] == value.sum
                assert found[f"{name}_bucket", named | {("le", "+Inf")}] == sum(value.counts)
            else:
                assert found[name, named] == value


@pytest.mark.spec("K2")
async def test_scrapes_at_once_ask_the_arbiter_once(samples: Samples) -> None:
    arbiter = Arbiter(samples)
    pages = await asyncio.gather(*(arbiter.page.text() for _ in range(5)))
    assert len(set(pages)) == 1
    assert arbiter.asked == 1
    arbiter.now_s += FRESH_S
    await arbiter.page.text()
    assert arbiter.asked == 2


@pytest.mark.spec("K2")
async def test_last_answer_is_shown_with_its_age_while_the_arbiter_is_away(
    samples: Samples,
) -> None:
    arbiter = Arbiter(samples)
    before = values(await arbiter.page.text())
    arbiter.is_up, arbiter.now_s = False, 20.0
    found = values(await arbiter.page.text())
    assert (found[UP, frozenset()], found[AGE, frozenset()]) == (0.0, 20.0)
    own = {(UP, frozenset[tuple[str, str]]()), (AGE, frozenset[tuple[str, str]]())}
    assert {k: v for k, v in found.items() if k not in own} == {
        k: v for k, v in before.items() if k not in own
    }
    assert before[UP, frozenset()] == 1.0


@pytest.mark.spec("K2")
async def test_page_tells_that_there_never_was_an_answer(samples: Samples) -> None:
    arbiter = Arbiter(samples)
    arbiter.is_up = False
    found = values(await arbiter.page.text())
    assert found == {(UP, frozenset()): 0.0, (AGE, frozenset()): float("inf")}
