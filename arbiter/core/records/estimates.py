"""How many bytes and seconds a load will take (A17). Integers, plain data in and out.

Order: explicit, else the learned peak of an earlier load of the same model under the same
settings, else what the holder computed from its files and the overhead that models of its
capability were seen to have beyond that. A learned peak above an explicit value wins. After a load
that failed for memory the next one asks for more, until one succeeds.

A holder computes from the headers of the files, which say every tensor's size; where there are
none it estimates: from the sizes of the files, else from the number of parameters in the name.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from arbiter.core.records.load_predictor import LoadTimeFit, Predictor
from arbiter.core.records.run_times import RunSpans, RunTimes
from arbiter.core.records.slow_loads import SlowLoads
from arbiter.core.settings import Settings
from arbiter.core.types import ModelName, Need
from arbiter.units import Bytes, Instant, Span

# Percent of a file's size that its weights take once loaded (A17): a GGUF file is used as it
# lies there, safetensors without a readable header may be cast or lie there in several variants.
ON_DEVICE_PERCENT = {".gguf": 110, ".safetensors": 130}

# `8B`, `0.5b`, `8x7B`, `135M`; not the `A3B` of experts in use, nor a letter of a longer word.
_PARAMETERS = re.compile(
    r"(?<![a-z0-9.])(?:(\d+)x)?(\d+(?:\.\d+)?)([bm])(?![a-z0-9])", re.IGNORECASE
)
# Words of a name that say how many bits a parameter takes; without one they are 16.
_BITS = {
    "fp32": 32,
    "fp8": 8,
    "int8": 8,
    "8bit": 8,
    "w8a8": 8,
    "awq": 4,
    "gptq": 4,
    "int4": 4,
    "4bit": 4,
    "nvfp4": 4,
    "mxfp4": 4,
}
_SCALES_PERCENT = 112  # of 4 and 8 bits: scales and zero points, a half for each 32 parameters


def of_files(sizes: Mapping[str, int]) -> Bytes | None:
    """Returns a model's bytes on a device, from names and sizes of its files; None when none is
    known."""
    known = [
        size * percent
        for name, size in sizes.items()
        for ending, percent in ON_DEVICE_PERCENT.items()
        if name.lower().endswith(ending)
    ]
    return Bytes(sum(known) // 100) if known else None


def of_name(name: str) -> Bytes | None:
    """Returns a model's bytes from the number of parameters in its name, as in
    `org/Qwen3-0.6B-FP8`; None when the name has none. Of several numbers the largest counts: a
    draft of 1B for 70B is no model of 1B."""
    sizes = [
        int(many or 1) * float(number) * (1e9 if unit in "bB" else 1e6)
        for many, number, unit in _PARAMETERS.findall(name)
    ]
    if not sizes:
        return None
    words = re.split(r"[^a-z0-9]+", name.lower())
    bits = min((_BITS[word] for word in words if word in _BITS), default=16)
    percent = _SCALES_PERCENT if bits < 16 else 100
    return Bytes(round(max(sizes) * bits / 8 * percent / 100))


class ModelKey(NamedTuple):
    """Names one model under one set of engine settings, for which learned values hold. A named
    tuple, because each price asks four tables by it: it is made and hashed in a fifth of the
    time."""

    capability: str
    model: str
    settings_key: str

    @property
    def name(self) -> ModelName:
        """Returns the model, whatever its settings."""
        return ModelName(self.capability, self.model)


def _row_key(capability: str) -> ModelKey:
    """Returns the key of the row with what holds for a whole capability."""
    return ModelKey(capability, "", "")


# Loads and wakes of one model that say how long the next will take: their median. Some take many
# times as long as the others, when the disk's pages had to be read again or a machine was busy; a
# mean of any kind keeps those for a while, a median of five forgets two of them at once.
RECENT_COUNT = 5


def _median(spans: tuple[Span, ...]) -> Span:
    ordered = sorted(spans)
    half = len(spans) // 2
    return Span((ordered[half] + ordered[-1 - half]) // 2)


class RecentLoadTimes:
    """Keeps, for each model, how long its newest loads took."""

    def __init__(self) -> None:
        self._spans: dict[ModelKey, tuple[Span, ...]] = {}
        self._middle: dict[ModelKey, Span] = {}  # of these; asked for with each price

    def note(self, key: ModelKey, took: Span) -> None:
        """Notes one more load; the oldest beyond RECENT_COUNT is forgotten."""
        self._spans[key] = spans = (*self._spans.get(key, ()), took)[-RECENT_COUNT:]
        self._middle[key] = _median(spans)

    def __contains__(self, key: ModelKey) -> bool:
        return key in self._middle

    def __iter__(self) -> Iterator[ModelKey]:
        return iter(self._middle)

    def of(self, key: ModelKey) -> Span:
        """Returns the median of a model's newest loads; 0 when there was none."""
        return self._middle.get(key, Span(0))

    def spans(self, key: ModelKey) -> tuple[Span, ...]:
        """Returns how long a model's newest loads took, oldest first; empty when there was none."""
        return self._spans.get(key, ())

    def forget(self, key: ModelKey) -> None:
        """Forgets the loads of a model."""
        self._spans.pop(key, None)
        self._middle.pop(key, None)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Says how many bytes a load will take, and where the number comes from."""

    device_bytes: Bytes
    host_bytes: Bytes  # asleep; 0: cannot sleep
    source: str  # explicit, learned, computed, corrected


# Settings of one model that are remembered, those that were used last; a kB each. The settings in
# force, those that a person goes back to, and as many of another system with the same state file.
SETTINGS_KEPT_COUNT = 4
ROW_VERSION = 1  # of exported rows; those before had no version, one load and one wake


class Estimates:
    """Learns bytes and seconds from loads, and predicts those of the next (A17)."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.version = 0  # rises whenever a size may have become another
        self._peak: dict[ModelKey, Bytes] = {}
        self._corrected: dict[ModelKey, Bytes] = {}  # after a failure for memory
        self._settled: dict[ModelKey, Bytes] = {}  # the peak up to its first use, of its last load
        self._loads = RecentLoadTimes()
        self._wakes = RecentLoadTimes()
        self._slow_loads: SlowLoads[ModelKey] = SlowLoads()
        self._runs: RunTimes[ModelKey] = RunTimes()
        # Under which settings each model was used, those used last at the end
        self._keys: dict[ModelName, dict[ModelKey, None]] = {}
        self._overhead: dict[str, int] = {}  # by capability: peak beyond what was computed
        self._turnover: dict[str, Span] = {}  # by capability: asked to leave until seen back
        self._slowest: dict[ModelName, Span] = {}  # of a model under any settings
        self._predictor = Predictor()
        self._sleepless: set[ModelKey] = set()  # a sleep of it did not give its bytes back
        self.changes_count = 0  # of what `export` returns
        self._changed: dict[ModelKey, int] = {}  # its rows by their last change, the newest last

    def note_devices_changed(self) -> None:
        """Has every size looked up again: what a learned one may be at most depends on devices."""
        self.version += 1

    def size(self, key: ModelKey, need: Need, need_is_explicit: bool) -> Estimate:
        """Returns what a load under this key will take, in the order of the module docstring."""
        return self._size(key, need, need_is_explicit, self._peak.get(key, Bytes(0)))

    def size_after_compaction(
        self, key: ModelKey, need: Need, need_is_explicit: bool, settled: Bytes
    ) -> Bytes:
        """Returns what a load would take if `settled` were the highest peak ever measured."""
        return self._size(key, need, need_is_explicit, settled).device_bytes

    def _size(self, key: ModelKey, need: Need, need_is_explicit: bool, peak: Bytes) -> Estimate:
        """Returns what a load takes if `peak` were the highest peak ever measured."""
        size_bytes = need.device_bytes
        source = "explicit"
        if not need_is_explicit:
            beyond = self._overhead.get(key.capability, 0)
            least = max(need.weights_bytes, need.least_bytes)
            size_bytes = Bytes(max(least, size_bytes + beyond))
            source = "computed"
        if peak and (peak > size_bytes or not need_is_explicit):
            size_bytes = self._learned(peak, need, need_is_explicit)
            source = "learned"
        corrected = self._corrected.get(key, Bytes(0))
        if corrected > size_bytes:
            size_bytes = corrected
            source = "corrected"
        return Estimate(size_bytes, need.host_bytes, source)

    def proven(self, name: ModelName) -> Bytes | None:
        """Returns the largest that a model was ever measured, with headroom; None when it never
        was."""
        mine = max((self._peak.get(key, Bytes(0)) for key in self._keys.get(name, ())), default=0)
        return self._with_headroom(Bytes(mine)) if mine else None

    def can_sleep(self, key: ModelKey) -> bool:
        """Says whether a sleep of this model may be tried."""
        return key not in self._sleepless

    def did_not_sleep(self, key: ModelKey) -> None:
        """Notes a sleep that did not give the bytes back. Once is enough for this epoch, because
        what stays behind is mostly the engine's own. It is not kept beyond it, because a zygote
        that died can be the cause too."""
        self._note_settings(key)
        self._sleepless.add(key)

    def _with_headroom(self, peak: Bytes) -> Bytes:
        return Bytes(peak + int(peak * self._settings.learned_headroom_fraction))

    def _learned(self, peak: Bytes, need: Need, need_is_explicit: bool) -> Bytes:
        learned = self._with_headroom(peak)
        return learned if need_is_explicit else Bytes(max(learned, need.least_bytes))

    def load_time(self, key: ModelKey, weights: Bytes = Bytes(0)) -> Span:
        """Returns how long a load takes: as it took so far, else as others of its capability took
        for as many bytes, else 0."""
        took = self._loads.of(key)
        if took or weights == 0 or key in self._loads:
            return took
        return self._predictor.seconds(key.capability, weights)

    def slowed_load_time(self, key: ModelKey, load: Span, now: Instant) -> Span:
        """Returns how long a load may take whose estimate is `load`: longer where loads of any
        model took longer than theirs of late."""
        return self._slow_loads.slowed(key, load, now)

    def load_begins(self, key: ModelKey, now: Instant) -> None:
        """Notes that a load begins."""
        self._note_settings(key)
        self._slow_loads.note_begun(key, now)

    def may_refuse(self, key: ModelKey, now: Instant) -> bool:
        """Says whether a request may be refused because the model's load takes too long. Its own
        loads say so for a time; then one more is tried, which is the next to say so."""
        return key not in self._loads or not self._slow_loads.is_long_ago(key, now)

    def wake_time(self, key: ModelKey) -> Span:
        """Returns how long a wake takes; 0 when the model was never woken."""
        return self._wakes.of(key)

    def slowest_load(self, name: ModelName) -> Span:
        """Returns the slowest load of a model under any settings; 0 when it never loaded."""
        return self._slowest.get(name, Span(0))

    def times(self) -> dict[ModelName, tuple[Span, Span]]:
        """Returns how long a load and a wake of each model take that ever loaded, under the
        settings with which it takes longest; 0 for a wake that was never seen."""
        spans: dict[ModelName, tuple[Span, Span]] = {}
        for key in self._loads:
            load, wake = spans.get(key.name, (Span(0), Span(0)))
            spans[key.name] = max(load, self._loads.of(key)), max(wake, self._wakes.of(key))
        return spans

    def run_times(self, name: ModelName) -> RunSpans | None:
        """Returns how long requests of a model run, under the settings with which they take
        longest; None before the first."""
        run_spans = [self._runs.read(key) for key in self._keys.get(name, ())]
        return max((spans for spans in run_spans if spans), default=None)

    def turnover(self, capability: str) -> Span:
        """Returns the time from asking a model of this capability to leave until its bytes are seen
        back; 0 when that was never seen."""
        return self._turnover.get(capability, Span(0))

    def note_turnover(self, capability: str, took: Span) -> None:
        """Learns how long a model took from its revoke until its bytes were seen back."""
        self._turnover[capability] = self._smoothed(self._turnover.get(capability, took), took)
        self._note_changed(_row_key(capability))

    def saw_overhead(self, key: ModelKey, need: Need, peak: Bytes) -> None:
        """Learns how far a model's peak lies beyond its computed need. Once for each load whose
        need was computed, not explicit."""
        beyond = max(peak, need.least_bytes) - need.device_bytes
        old = self._overhead.get(key.capability, beyond)
        share = self._settings.load_ewma_fraction
        self._overhead[key.capability] = old + int((beyond - old) * share)
        self.version += 1
        self._note_changed(_row_key(key.capability))

    def saw_peak(self, key: ModelKey, peak: Bytes) -> None:
        """Learns a measured peak, if it is the highest yet."""
        if peak > self._peak.get(key, Bytes(0)):
            self._note_settings(key)
            self._peak[key] = peak
            self.version += 1
            self._note_changed(key)

    def saw_settled(self, key: ModelKey, held: Bytes) -> None:
        """Learns what a load needed up to its first use, which the next load replaces."""
        self._note_settings(key)
        self._settled[key] = held
        self._note_changed(key)

    def settled(self, key: ModelKey) -> Bytes:
        """Returns what the last load needed up to its first use; 0 when that was never seen."""
        return self._settled.get(key, Bytes(0))

    def compacted(self, key: ModelKey, settled: Bytes) -> None:
        """Forgets a peak above `settled`: it was measured on a process that is gone, and the next
        load's is measured anew (D7)."""
        if 0 < settled < self._peak.get(key, Bytes(0)):
            self._peak[key] = settled
            self.version += 1
            self._note_changed(key)

    def loaded(
        self, key: ModelKey, took: Span, weights: Bytes = Bytes(0), now: Instant = Instant(0)
    ) -> None:
        """Learns how long a load took, which also ends the correction after a failure for
        memory."""
        self._note_settings(key)
        self._predictor.loaded(key.capability, weights, took)
        if estimate := self._loads.of(key):
            self._slow_loads.note(key, estimate, took, now)
        if self._corrected.pop(key, None):
            self.version += 1
        self._loads.note(key, took)
        self._note_slowest(key)
        self._note_changed(key, _row_key(key.capability))

    def _note_slowest(self, key: ModelKey) -> None:
        name = key.name
        self._slowest[name] = max(self._loads.of(key), self._slowest.get(name, Span(0)))

    def woke(self, key: ModelKey, took: Span) -> None:
        """Learns how long a wake took."""
        self._note_settings(key)
        self._wakes.note(key, took)
        self._note_changed(key)

    def ran(self, key: ModelKey, took: Span) -> None:
        """Learns how long an answered request ran since its model served."""
        self._note_settings(key)
        if self._runs.note(key, took):
            self._note_changed(key)

    def _smoothed(self, old: Span, took: Span) -> Span:
        return Span(old + int((took - old) * self._settings.load_ewma_fraction))

    def ran_out(self, key: ModelKey, held: Bytes) -> None:
        """Learns that a load failed for memory while it was charged `held`: the next asks for
        more."""
        self._note_settings(key)
        self._corrected[key] = Bytes(held + int(held * self._settings.oom_growth_fraction))
        self.version += 1
        self._note_changed(key)

    def _note_settings(self, key: ModelKey) -> None:
        """Notes that a model is used under these settings. What was learned under those that were
        used longest ago is forgotten beyond SETTINGS_KEPT_COUNT."""
        keys = self._keys.setdefault(key.name, {})
        keys.pop(key, None)
        keys[key] = None
        if len(keys) > SETTINGS_KEPT_COUNT:
            self.forget(next(iter(keys)))

    def forget(self, key: ModelKey) -> None:
        """Forgets what was learned under one key."""
        self.version += 1
        for table in (self._peak, self._corrected, self._settled):
            table.pop(key, None)
        for recent in (self._loads, self._wakes):
            recent.forget(key)
        self._runs.forget(key)
        self._slow_loads.forget(key)
        self._keys.get(key.name, {}).pop(key, None)
        self._sleepless.discard(key)
        self._note_changed(key)

    def forget_model(self, *names: ModelName) -> None:
        """Forgets what was learned of models under any settings."""
        for name in names:
            for key in list(self._keys.get(name, ())):
                self.forget(key)
            self._slowest.pop(name, None)
            self._keys.pop(name, None)
            self._note_changed(_row_key(name.capability))

    # -- across restarts -----------------------------------------------------------------------

    def _note_changed(self, *keys: ModelKey) -> None:
        self.changes_count += 1
        for key in keys:
            self._changed.pop(key, None)
            self._changed[key] = self.changes_count

    def changed_since(self, count: int) -> tuple[list[dict[str, Any]], list[ModelKey]]:
        """Returns the rows of `export` that have changed since `changes_count` was `count`, the
        newest change last, and the keys of those that it has no more."""
        changed = takewhile(lambda key: self._changed[key] > count, reversed(self._changed))
        rows = {key: self._row(key) for key in reversed(list(changed))}
        return [row for row in rows.values() if row], [key for key, row in rows.items() if not row]

    def export(self) -> list[dict[str, Any]]:
        """Returns plain rows for the state file, which `restore` reads back: one for each model
        under its settings, and one without a model for what holds for a whole capability."""
        sizes = {*self._peak, *self._corrected, *self._settled}
        models = {*sizes, *self._loads, *self._wakes, *self._runs}
        slowest = {name.capability for name in self._slowest}
        capabilities = {*self._overhead, *self._turnover, *slowest, *self._predictor.fits}
        keys = [*sorted(models, key=repr), *map(_row_key, sorted(capabilities))]
        return [row for key in keys if (row := self._row(key))]

    def _row(self, key: ModelKey) -> dict[str, Any] | None:
        """Returns one row of `export`; None where nothing is known any more."""
        values = self._model_values(key) if key.model else self._capability_values(key.capability)
        nothing: tuple[Any, ...] = (0, []) if key.model else (None, {})  # an overhead may be 0
        if all(value in nothing for value in values.values()):
            return None
        return {"version": ROW_VERSION, **key._asdict(), **values}

    def _model_values(self, key: ModelKey) -> dict[str, Any]:
        return {
            "peak_bytes": self._peak.get(key, 0),
            "corrected_bytes": self._corrected.get(key, 0),
            "settled_bytes": self._settled.get(key, 0),
            "loads_ns": list(self._loads.spans(key)),
            "wakes_ns": list(self._wakes.spans(key)),
            "runs_ns": list(self._runs.spans(key)),
        }

    def _capability_values(self, name: str) -> dict[str, Any]:
        fit = self._predictor.fits.get(name)
        return {
            "overhead_bytes": self._overhead.get(name),
            "turnover_ns": self._turnover.get(name),
            "slowest_ns": {m: took for (c, m), took in self._slowest.items() if c == name},
            "fit": fit.export() if fit else None,
        }

    def restore(self, rows: list[dict[str, Any]]) -> None:
        """Takes back the rows of `export`, the newest last; rows of a version that this code does
        not know are left out."""
        for row in rows:
            version = row.get("version", 0)
            if version == 0:
                self._restore_first(row)
            elif version == ROW_VERSION and row["model"]:
                self._restore_model(row)
            elif version == ROW_VERSION:
                self._restore_capability(row)

    def _restore_first(self, row: dict[str, Any]) -> None:
        """Takes back a row of the first version, which had one load and one wake: their medians."""
        wakes = [row["wake_ns"]] if row.get("wake_ns") else []
        loads = [row["load_ns"]] if row["load_ns"] else []
        self._restore_model(row | {"corrected_bytes": 0, "loads_ns": loads, "wakes_ns": wakes})

    def _restore_model(self, row: dict[str, Any]) -> None:
        key = ModelKey(row["capability"], row["model"], row["settings_key"])
        self._note_settings(key)
        if row["peak_bytes"]:
            self._peak[key] = Bytes(row["peak_bytes"])
        if row["corrected_bytes"]:
            self._corrected[key] = Bytes(row["corrected_bytes"])
        if settled := row.get("settled_bytes"):  # rows of the same version had none before D7
            self._settled[key] = Bytes(settled)
        for took_ns in row["loads_ns"]:
            self._loads.note(key, Span(took_ns))
            self._note_slowest(key)
        for took_ns in row["wakes_ns"]:
            self._wakes.note(key, Span(took_ns))
        for took_ns in row.get("runs_ns", ()):  # rows of the same version had none before J5
            self._runs.note(key, Span(took_ns))

    def _restore_capability(self, row: dict[str, Any]) -> None:
        name = row["capability"]
        if row["overhead_bytes"] is not None:
            self._overhead[name] = row["overhead_bytes"]
        if row["turnover_ns"] is not None:
            self._turnover[name] = Span(row["turnover_ns"])
        for model, took_ns in row["slowest_ns"].items():
            self._slowest[ModelName(name, model)] = Span(took_ns)
        if row["fit"] is not None:
            self._predictor.fits[name] = LoadTimeFit(*row["fit"])
