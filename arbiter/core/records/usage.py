"""Keeps what uses of models have taught: how often each is used, at which hours, how soon it is
wanted again, and which model follows which (C11).
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from arbiter.core.records.reuse import ReuseLearner
from arbiter.core.records.usage_rates import AHEAD, HourlyUsage, UsageCounts, UsageRates
from arbiter.core.types import ModelName
from arbiter.units import Instant, Span, since

EXPORT_VERSION = 1  # of what `export` returns
FOLLOWED_COUNT = 1_000  # models whose followers are remembered; some 100 bytes each


class Usage:
    """Keeps uses of models: by rates over two windows, by hour of the day, by the clock of
    turnovers, and by the model used before."""

    def __init__(self, rate_window: Span, lasting_window: Span, now: Instant) -> None:
        self.rates = UsageRates(rate_window)
        self.lasting_rates = UsageRates(lasting_window)
        self.hours = HourlyUsage(now)
        self.reuse = ReuseLearner()
        self.last_used: tuple[ModelName, Instant] | None = None
        # By model, how often each other model was used next.
        self.transition_counts: dict[ModelName, dict[ModelName, int]] = {}

    def note_uses(self, name: ModelName, times_count: int, now: Instant) -> None:
        """Counts so many uses of a model, for rates and for habits."""
        self.rates.used(name, times_count, now)
        self.lasting_rates.used(name, times_count, now)
        self.hours.used(name, times_count, now)
        self.reuse.wanted(name)
        self.reuse.used(name, times_count)

    def note_order(self, name: ModelName, now: Instant, follow_within: Span) -> None:
        """Counts that this model was used after the one used before, where that is another and no
        longer ago than `follow_within`. Of more than FOLLOWED_COUNT models the oldest is
        forgotten."""
        last, self.last_used = self.last_used, (name, now)
        if last is None or last[0] == name or since(last[1], now) > follow_within:
            return
        followers = self.transition_counts.setdefault(last[0], {})
        followers[name] = followers.get(name, 0) + 1
        if len(self.transition_counts) > FOLLOWED_COUNT:
            del self.transition_counts[next(iter(self.transition_counts))]

    def note_wanted(self, name: ModelName, now: Instant) -> None:
        """Notes a request for a model that must load, and has something learned from it."""
        self.reuse.wanted(name)
        self.reuse.ask_others(name, lambda other: self.counts(other, now))

    def counts(self, name: ModelName, now: Instant) -> UsageCounts:
        """Returns how often a model was used in both windows, and will be in the coming hours."""
        recent_count = self.rates.recent(name, now)
        lasting_count = self.lasting_rates.recent(name, now)
        any_hours_count = lasting_count * AHEAD / self.lasting_rates.window
        usual_count = self.hours.ahead(name, now, any_hours_count)
        return UsageCounts(recent_count, lasting_count, any_hours_count, usual_count)

    def forget(self, names: Sequence[ModelName]) -> None:
        """Forgets models: all at once, because each of these walks what is kept of all models."""
        self.reuse.forget(*names)
        for name in names:
            self.rates.forget(name)
            self.lasting_rates.forget(name)
            self.hours.forget(name)
            self.transition_counts.pop(name, None)
        gone = set(names)
        for followers in self.transition_counts.values():
            for name in gone & followers.keys():
                del followers[name]
        if self.last_used and self.last_used[0] in gone:
            self.last_used = None

    # -- across restarts -----------------------------------------------------------------------

    def models(self) -> list[ModelName]:
        """Returns the models of whose uses anything is known, the first used first."""
        books = self.reuse, self.rates, self.lasting_rates, self.hours, self.transition_counts
        return list(dict.fromkeys(chain(*books)))

    def export(self, names: Sequence[ModelName] | None, now: Instant) -> dict[str, Any]:
        """Returns all that is kept as plain values; of these models only, where they are named.
        Instants are of the machine's clock, which outlives this process."""
        named = self.models() if names is None else names
        followed = ((name, self.transition_counts.get(name)) for name in named)
        return {
            "version": EXPORT_VERSION,
            "exported_ns": now,
            "rates": self.rates.export(named),
            "lasting_rates": self.lasting_rates.export(named),
            "hours": self.hours.export(named),
            "reuse": self.reuse.export(names),
            "followers": [
                [*name, [[*follower, count] for follower, count in counts.items()]]
                for name, counts in followed
                if counts is not None
            ],
        }

    def restore(self, exported: dict[str, Any], now: Instant) -> None:
        """Takes back the values of `export`; values of another version, or from a clock that was
        ahead of this one, are left out."""
        if exported.get("version") != EXPORT_VERSION or exported["exported_ns"] > now:
            return
        self.rates.restore(exported["rates"])
        self.lasting_rates.restore(exported["lasting_rates"])
        self.hours.restore(exported["hours"])
        if learned := exported.get("reuse"):  # older versions of this code had none
            self.reuse.restore(learned)
        for capability, model, followers in exported["followers"]:
            counts = {ModelName(c, m): count for c, m, count in followers}
            self.transition_counts[ModelName(capability, model)] = counts
