"""The mixed hour is the same for every system; a failure counts as the longest wait."""

from typing import Any

import pytest

from benchmarks.one_card.__main__ import figures_of, split, told_by_events
from benchmarks.one_card.hour import RATES, Hour
from benchmarks.one_card.player import LONGEST_S, Seen

MODELS = {
    "chat": "c",
    "embedding": "e",
    "rerank": "r",
    "vision": "v",
    "asr": "a",
    "tts": "t",
    "vad": "d",
    "image": "i",
}


def hour(seed: int) -> Hour:
    return Hour(seed, 60.0, MODELS, b"sound")


@pytest.mark.spec("N5")
def test_hour_is_the_same_for_a_seed_and_asks_for_every_capability() -> None:
    items = hour(7).items()
    assert items == hour(7).items() and items != hour(8).items()
    assert len(items) == sum(bursts * length for bursts, length in RATES.values())
    assert [i.at_s for i in items] == sorted(i.at_s for i in items)
    assert {capability for i in items for capability, _, _ in i.calls} == set(MODELS)


@pytest.mark.spec("N5")
def test_failure_counts_as_the_longest_wait_and_not_as_goodput() -> None:
    seen = [Seen("chat", 0.0, 1.0, 2.0) for _ in range(3)]
    seen += [Seen("chat", 0.0, failure="507: none", is_memory=True), Seen("batch", 5.0, 1.0, 4.0)]
    found = figures_of(seen, wall_s=60.0)
    assert found["failed"] == found["failed_for_memory"] == 1
    assert found["useful_s"]["max"] == LONGEST_S and found["useful_s"]["p50"] == 1.0
    assert found["goodput_per_min"] == 3.0 and found["good_share"] == 0.75
    assert found["batch_done_s"] == 9.0


@pytest.mark.spec("N5")
def test_waits_are_compared_with_what_was_predicted_when_they_began() -> None:
    def line(kind: str, ticket: str, unix_s: float, took_s: float = 0.0) -> dict[str, Any]:
        return {"kind": kind, "ticket": ticket, "unix_s": unix_s, "took_s": took_s}

    events = [
        line("ticket_waits", "a", 0.0, 2.0),
        line("ticket_waits", "b", 1.0, 1.0),
        line("model_load", "a", 3.0, 0.5),
        line("model_wake", "b", 4.5, 0.5),
        line("model_load", "c", 5.0, 0.5),
    ]
    found = told_by_events(events)
    assert (found["loads"], found["wakes"], found["waits"]) == (2, 1, 2)
    assert found["longest_wait_s"] == 3.5 and found["predicted_for_it_s"] == 1.0
    assert found["waits_above_twice_predicted"] == 1 and found["worst_excess_s"] == 1.5


@pytest.mark.spec("N5")
def test_static_split_gives_chat_its_part_and_leaves_out_what_does_not_fit_beside_it() -> None:
    sizes = {"c": 400, "e": 200, "v": 350}
    assert split(sizes, "c", card_bytes=700) == [["c"], ["e"]]
