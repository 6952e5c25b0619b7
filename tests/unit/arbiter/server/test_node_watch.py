"""What the arbiter's process looks at and saves each second, and what it does not save again."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from arbiter.core import events as ev
from arbiter.core.arbiter import Arbiter
from arbiter.core.records.estimates import SETTINGS_KEPT_COUNT, ModelKey
from arbiter.core.records.usage_rates import UsageCounts
from arbiter.core.settings import DEFAULTS
from arbiter.core.types import ModelName
from arbiter.server.event_log import EventLog
from arbiter.server.hours_clock import HoursClock
from arbiter.server.node_watch import USAGE_PART_COUNT, NodeWatch
from arbiter.server.shell import Shell
from arbiter.server.store import ExpectedHolder, Store
from arbiter.units import Epoch, HolderId, Instant, NodeId, Span, TicketId, in_seconds, seconds
from policies import bundle

N = NodeId("n")
SILENT_S = in_seconds(DEFAULTS.timeouts.silent)


class NoAgents:
    def kill(self, node: NodeId, ticket: TicketId) -> None: ...
    def probe(self, node: NodeId) -> None: ...
    def drop_slabs(self, node: NodeId, owner: str) -> None: ...
    def drop_tenant(self, node: NodeId, tenant: str, ago: Span) -> None: ...
    async def look(self, feed: Callable[[ev.Event], None], known: Collection[NodeId]) -> None: ...

    async def dead(self, members: list[ExpectedHolder]) -> list[HolderId]:
        return []


class Watched:
    """A watch over a real core and a real state file; time stands still."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 0.0
        self.store = Store(folder / "state", "session")
        known = frozenset(member.holder for member in self.store.members())
        self.core = Arbiter(DEFAULTS, bundle(DEFAULTS), Epoch(1), known, self.now())
        self.core.restore_learned(self.store.learned())
        shell = Shell(self.core, Epoch(1), NoAgents(), EventLog(Epoch(1)), clock=self.now)
        hours = HoursClock(shell.feed)
        self.watch = NodeWatch(
            shell, NoAgents(), self.store, lambda: None, hours, 10, lambda: self.now_s
        )

    def now(self) -> Instant:
        return Instant(seconds(self.now_s))

    def saved(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The facts that are written from now on."""
        written, save = list[str](), self.store._save_fact

        def note(name: str, value: bytes) -> bool:
            written.append(name)
            return save(name, value)

        monkeypatch.setattr(self.store, "_save_fact", note)
        return written


@pytest.mark.spec("N1")
def test_usage_is_written_when_a_model_was_used_and_not_at_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path)
    watched.watch.save_usage()
    written = watched.saved(monkeypatch)
    watched.now_s = 100.0
    watched.watch.save_usage()
    assert not written
    watched.core._state.usage.rates.used(ModelName("c", "a"), 5, watched.core._state.now)
    watched.watch.save_usage()
    watched.watch.save_usage()
    assert written == ["usage"]


def use(watched: Watched, *numbers: int) -> None:
    """A request and a load for each of these models."""
    state = watched.core._state
    for n in numbers:
        name = ModelName("c", f"m{n}")
        state.usage.rates.used(name, 1, state.now)
        state.usage.hours.used(name, 1, state.now)
        state.usage.reuse.wanted(name)
        state.usage.reuse.used(name, 1)
        state.usage.reuse.loaded(0.1)


@pytest.mark.spec("N2")
def test_usage_of_many_models_is_written_in_parts_one_with_each_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, parts_count = Watched(tmp_path), 4
    use(watched, *range(parts_count * USAGE_PART_COUNT - 1))
    written = watched.saved(monkeypatch)
    sizes = []
    for count in range(1, parts_count + 1):
        watched.watch.save_usage()
        assert len([name for name in written if "usage" in name]) == count
        sizes.append(len(watched.store.usage()["rates"]))
    assert sizes == [64, 128, 192, 255]
    again = Arbiter(DEFAULTS, bundle(DEFAULTS), Epoch(2), frozenset(), watched.now())
    again.restore_usage(watched.store.usage())
    assert again.export_usage() == watched.core.export_usage()


@pytest.mark.spec("N2")
def test_only_the_part_with_a_model_that_was_used_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path)
    use(watched, *range(3 * USAGE_PART_COUNT))
    watched.watch.save_all()
    written = watched.saved(monkeypatch)
    state = watched.core._state
    state.usage.rates.used(ModelName("c", f"m{2 * USAGE_PART_COUNT}"), 1, state.now)
    for _ in range(3):
        watched.watch.save_usage()
    assert written == ["usage 2"]


@pytest.mark.spec("N2", "A17")
def test_parts_of_models_that_were_forgotten_leave_the_file(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    use(watched, *range(3 * USAGE_PART_COUNT))
    watched.watch.save_all()
    state = watched.core._state
    for name in state.usage.models()[10:]:
        state.usage.rates.forget(name)
        state.usage.hours.forget(name)
        state.usage.reuse.forget(name)
    watched.watch.save_all()
    assert len(watched.store.usage()["rates"]) == 10


@pytest.mark.spec("A17", "A18")
def test_usage_of_an_arbiter_that_ended_between_two_parts_is_restored(tmp_path: Path) -> None:
    """The second part is newer than the first, which knows neither its models nor its clock."""
    watched = Watched(tmp_path)
    use(watched, *range(USAGE_PART_COUNT))
    watched.watch.save_usage()
    use(watched, *range(USAGE_PART_COUNT, 2 * USAGE_PART_COUNT))
    first, second = watched.core.used_models[:64], watched.core.used_models[64:]
    exported = watched.core.export_usage(second)
    watched.store.save_usage(1, exported | {"reuse": {"models": exported["reuse"]["models"]}})
    again = Arbiter(DEFAULTS, bundle(DEFAULTS), Epoch(2), frozenset(), watched.now())
    again.restore_usage(watched.store.usage())
    assert again.used_models == [*first, *second]
    prices = [again._state.usage.reuse.reuse(name, UsageCounts()).chance for name in second]
    assert all(0 < chance < 1 for chance in prices)


@pytest.mark.spec("C11", "A17")
def test_what_could_not_be_written_is_written_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path)
    watched.watch.save_all()
    watched.core._state.usage.rates.used(ModelName("c", "a"), 5, watched.core._state.now)
    watched.core._state.estimates.note_turnover("c", seconds(4))
    with monkeypatch.context() as full:
        full.setattr(watched.store, "_run", lambda *_: None)
        watched.watch.save_all()
    watched.watch.save_all()
    learned: list[Any] = watched.store.learned()
    assert [row["capability"] for row in learned] == ["c"]
    assert watched.store.usage()["rates"]


@pytest.mark.spec("A18", "D9")
def test_removals_that_could_not_be_written_are_written_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path)
    watched.core.restore_removing([["c", "a"]])
    with monkeypatch.context() as full:
        full.setattr(watched.store, "_run", lambda *_: None)
        watched.watch.save_removing()
    watched.watch.save_removing()
    assert watched.store.removing() == [["c", "a"]]


@pytest.mark.spec("A17")
def test_rows_of_newer_code_are_left_in_the_file(tmp_path: Path) -> None:
    newer = {"version": 99, "capability": "c", "model": "b", "settings_key": "k"}
    Store(tmp_path / "state", "newer").save_learned([newer])
    watched = Watched(tmp_path)
    watched.core._state.estimates.note_turnover("c", seconds(4))
    watched.watch.save_learned()
    assert newer in watched.store.learned() and len(watched.store.learned()) == 2


@pytest.mark.spec("A17", "A18")
def test_settings_used_longest_ago_leave_the_file_over_restarts(tmp_path: Path) -> None:
    keys = [ModelKey("c", "a", str(n)) for n in range(SETTINGS_KEPT_COUNT + 1)]
    watched = Watched(tmp_path)
    for key in keys[:-1]:
        watched.core._state.estimates.loaded(key, seconds(1))
        watched.watch.save_learned()
    watched.core._state.estimates.loaded(keys[0], seconds(1))  # the oldest row is the newest now
    watched.watch.save_learned()
    row = next(row for row in watched.store.learned() if row["model"])
    watched.store.save_learned([row | keys[-1]._asdict()])  # of another system, which knew none
    again = Watched(tmp_path)
    again.watch.save_learned()
    kept = {row["settings_key"] for row in again.store.learned() if row["model"]}
    assert kept == {key.settings_key for key in (keys[0], *keys[2:])}


@pytest.mark.spec("A5", "A18")
async def test_driver_that_stays_silent_after_a_restart_is_not_awaited_like_a_replica(
    tmp_path: Path,
) -> None:
    before = Store(tmp_path / "state", "session")
    before.add_member(ExpectedHolder(HolderId("driver"), N, 7, 9, is_driver=True))
    before.add_member(ExpectedHolder(HolderId("replica"), N, 8, 9))
    watched = Watched(tmp_path)
    watched.now_s = SILENT_S
    await watched.watch.drop_dead_holders()
    assert watched.core.awaited == {"driver", "replica"}
    watched.now_s = SILENT_S + 1
    await watched.watch.drop_dead_holders()
    assert watched.core.awaited == {"replica"}
    assert [m.holder for m in before.members()] == ["replica"]
