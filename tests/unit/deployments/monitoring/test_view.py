"""The rows that console and terminal draw."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbiter.core.reports.snapshot import CooldownView, FloorView, HolderView, HoursView
from arbiter.protocol.json_codec import plain
from arbiter.units import HolderId, seconds
from deployments.monitoring.parts import COMING_BACK, FOREIGN, FREE, GRANTED, UNNAMED
from deployments.monitoring.story import event_row
from deployments.monitoring.view import (
    AdapterCounts,
    Facts,
    View,
    from_plain,
    to_plain,
    view_of,
)
from tests.support.arbiter_states import NODE, Books, size

NOW_S = 5_000.0
GPU = "n1/gpu:0"


def shown(books: Books, **facts: object) -> View:
    return view_of(books.state(), Facts(**facts), NOW_S)  # type: ignore[arg-type]


@pytest.mark.spec("K4")
def test_parts_of_a_device_are_granted_coming_back_foreign_by_name_and_free() -> None:
    books = Books(foreign={GPU: {"blender": 100}})
    books.holds("talk", 300, inflight=1)
    books.holds("old", 200, "reclaiming")
    books.leases("train", 100)
    device = shown(books).devices[0]
    assert [(p.kind, p.label, p.size_bytes, p.measured_bytes) for p in device.parts] == [
        (GRANTED, "talk", size(300), size(270)),
        (COMING_BACK, "old", size(200), size(180)),
        (GRANTED, "train", size(100), size(90)),
        (FOREIGN, "blender", size(100), size(100)),
        (FREE, "", size(300), None),
    ]
    assert device.parts[0].ticket == "talk-1"


@pytest.mark.spec("K4")
@given(
    named=st.dictionaries(st.sampled_from(["a", "b", "c", ""]), st.integers(0, 900), max_size=4),
    foreign=st.integers(0, 700),
    charged=st.integers(0, 900),
)
def test_the_parts_of_a_device_add_up_to_its_budget_and_what_is_beyond_it(
    named: dict[str, int], foreign: int, charged: int
) -> None:
    """Whatever NVML says of processes, whose bytes may lie beside the budget."""
    books = Books(budgets={GPU: 1_000})
    books.holds("talk", charged)
    state = books.state()
    device = state["devices"][0]
    device["foreign_bytes"] = foreign
    device["free_bytes"] = device["budget_bytes"] - device["charged_bytes"] - foreign
    device["foreign_processes"] = [
        {"pid": 7, "name": name, "size_bytes": held} for name, held in named.items()
    ]
    parts = view_of(state, Facts(), NOW_S).devices[0].parts
    assert all(part.size_bytes > 0 for part in parts)
    beyond = max(0, -device["free_bytes"])
    assert sum(part.size_bytes for part in parts) == device["budget_bytes"] + beyond
    if not sum(named.values()) and foreign:
        assert UNNAMED in [part.label for part in parts]


@pytest.mark.spec("K4")
def test_models_with_a_ticket_come_first_with_what_they_hold_and_when_they_leave() -> None:
    books = Books()
    books.holds("talk", 300, idle_s=20.0)
    books.holds("busy", 100, inflight=3)
    books.holds("asked", 10, idle_s=0.0, stay_warm=seconds(30.0))
    books.holds("kept", 50, pinned=True)
    books.loaded_in("talk", 4.0, wake_s=0.5)
    books.floors.append(FloorView("chat", "talk", "host"))
    books.has_adapters("talk", hot=2, images=5)
    homes = dict.fromkeys(["talk", "busy", "asked", "kept", "away"], "chat")
    rows = {row.model: row for row in shown(books, homes=homes, adapters={"talk": 9}).models}
    assert list(rows) == ["asked", "busy", "kept", "talk", "away"]
    talk = rows["talk"]
    assert (talk.state, talk.floor, talk.leaves_unix_s) == ("resident", "host", NOW_S + 280)
    assert (talk.charged_bytes, talk.measured_bytes) == (size(300), size(270))
    assert (talk.load_s, talk.wake_s, talk.learned_bytes) == (4.0, 0.5, size(300))
    assert talk.adapters == AdapterCounts(hot=2, warm=3, cold=4)
    assert rows["asked"].leaves_unix_s == NOW_S + 330
    assert (rows["busy"].inflight, rows["busy"].leaves_unix_s) == (3, None)
    assert (rows["kept"].is_pinned, rows["kept"].leaves_unix_s) == (True, None)
    assert (rows["away"].state, rows["away"].tickets, rows["away"].adapters) == ("cold", (), None)


@pytest.mark.spec("K4")
def test_hours_and_a_cool_down_are_told_of_their_model() -> None:
    books = Books(cooldowns=[CooldownView("chat", "talk", "no file", 2, seconds(30.0))])
    state = books.state()
    state["hours"] = [plain(HoursView("model", "chat", "talk", "22-07", False, seconds(9.0)))]
    (row,) = view_of(state, Facts({"talk": "chat"}), NOW_S).models
    assert (row.failure, row.cools_until_unix_s) == ("no file", NOW_S + 30)
    assert (row.hours, row.is_open) == ("22-07", False)


@pytest.mark.spec("K4")
def test_the_queue_shows_what_waits_by_when_and_what_is_late() -> None:
    books = Books()
    books.waits("first", 900, expected_s=4.0, left_s=9.0, priority="high")
    books.waits("second", 100, expected_s=12.0, left_s=9.0)
    books.waits("third", 100, expected_s=None)
    first, second, third = shown(books).queue
    assert (first.position, first.priority, first.need_bytes) == (1, "high", size(900))
    assert (first.since_unix_s, first.expected_unix_s) == (NOW_S - 2, NOW_S + 4)
    assert (first.deadline_unix_s, first.is_late) == (NOW_S + 9, False)
    assert second.is_late
    assert (third.expected_unix_s, third.deadline_unix_s, third.is_late) == (None, None, False)


@pytest.mark.spec("K4")
def test_leases_and_tenants_are_rows_and_no_models() -> None:
    books = Books()
    books.leases("train", 100)
    view = shown(books)
    assert view.models == ()
    (lease,) = view.leases
    assert (lease.name, lease.tenant, lease.charged_bytes) == ("train", "acme", size(100))
    assert (lease.is_preemptible, lease.ends_unix_s) == (True, NOW_S + 120)


@pytest.mark.spec("K4", "J4")
def test_jobs_are_rows_with_their_counts_the_unfinished_first() -> None:
    books = Books()
    books.works("batch-0", 7, 7, state="completed")
    books.works("batch-1", 2, 7)
    first, last = shown(books).jobs
    assert (first.id, first.state, first.done, first.total) == ("batch-1", "in_progress", 2, 7)
    assert first.ended_unix_s is None and first.created_unix_s < time.time()
    assert (last.id, last.done, last.ended_unix_s is None) == ("batch-0", 7, False)


@pytest.mark.spec("K4")
def test_nothing_needs_attention_where_all_is_well() -> None:
    books = Books()
    books.holds("talk", 300)
    books.waits("next", 900)
    assert shown(books).alerts == ()


@pytest.mark.spec("K4")
def test_what_needs_attention_is_told_with_numbers_the_worst_first() -> None:
    books = Books(
        is_settled=False,
        pressure={GPU: "low"},
        cooldowns=[CooldownView("chat", "talk", "no file", 2, seconds(30.0))],
        holders=[HolderView(HolderId("chat#1"), NODE, "chat", seconds(0.0), size(64))],
    )
    books.holds("big", 1_200)
    books.waits("next", 10, expected_s=12.0, left_s=9.0)
    alerts = shown(books).alerts
    assert alerts[0].level == "critical"
    assert "64.0 MiB" in alerts[0].text
    text = {alert.about: alert.text for alert in alerts}
    assert text.keys() == {"arbiter", GPU, "chat#1", "talk", "next-1"}
    assert "12 s, after its deadline in 9 s" in text["next-1"]
    assert "failed to load 2 times: no file" in text["talk"]
    assert any("overcommitted by 200.0 MiB" in alert.text for alert in alerts)


@pytest.mark.spec("K4")
def test_a_view_comes_through_json_as_it_was() -> None:
    books = Books(foreign={GPU: {"blender": 100}})
    books.holds("talk", 300)
    books.waits("next", 900)
    books.leases("train", 100)
    books.has_adapters("talk", 1, 2)
    view = shown(books, homes={"talk": "chat", "away": "chat"}, adapters={"talk": 3})
    assert from_plain(json.loads(json.dumps(to_plain(view)))) == view
    with pytest.raises(ValueError, match="epoch"):
        from_plain(to_plain(view) | {"epoch": "first"})


@pytest.mark.spec("K4")
def test_rows_of_what_rests_do_not_change_as_time_passes() -> None:
    """So that a stream of changes can leave them out."""
    books = Books()
    books.holds("talk", 300, inflight=1)
    state = books.state()
    facts = Facts({"talk": "chat", "away": "chat"})
    before = view_of(state, facts, NOW_S)
    state["tickets"][0]["in_state_s"] += 7.0
    after = view_of(state, facts, NOW_S + 7)
    assert (after.models, after.devices) == (before.models, before.devices)


@pytest.mark.spec("K1", "K4")
def test_an_event_is_a_sentence_with_its_numbers_and_a_mark_with_its_reason() -> None:
    about = {"seq": 7, "unix_s": NOW_S, "epoch": 1, "took_s": 0.5, "size_bytes": size(300)}
    model = {"ticket": "talk-1", "holder": "chat#1", "capability": "chat", "model": "talk"}
    left = event_row({**about, **model, "kind": "model_unload", "reason": "swap", "to": "gone"})
    assert left.text == "talk leaves (swap), 300.0 MiB, 0.50 s"
    assert (left.mark, left.tone, left.ticket) == ("talk leaves: swap", "went", "talk-1")
    asleep = event_row({**about, **model, "kind": "model_unload", "reason": "idle", "to": "asleep"})
    assert asleep.mark == "talk falls asleep: idle"
    other = event_row({"seq": 8, "unix_s": NOW_S, "kind": "node_seen", "node": "n1", "devices": 2})
    assert (other.text, other.mark, other.tone) == ("node n1, devices 2", None, "plain")
    waits = {"waiting": "next-1", "act": "unload"}
    evicted = event_row({**about, **model, "kind": "eviction", "reason": "swap", **waits})
    assert evicted.text.startswith("talk is asked to leave (swap) for next-1")
