"""What happens to the world besides asking: pairs of models, floors, a model removed for a while, a
resident that grows, a capability that Python registers for a while, engines that take more than
they were granted, compactions that give it back, and hours that begin and end.

Mixed into every run like the faults, so that each rule meets every other in trouble.
"""

import random
from typing import TYPE_CHECKING

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.units import seconds
from tests.sim.lease_holders import LeaseHolder

if TYPE_CHECKING:
    from tests.sim.world import World

PAIR = ("b", "c")  # a gang of two processes
EXTRA, EXTRA_MODEL = "extra", "x"  # registered from Python, or unknown
MOVABLE = "abcdeg"  # neither set by hand nor removed: the pinned one
BLOAT_SHARE = 0.3  # far above the headroom of what was learned
NIGHT, EVENING = HOURS = ("night", "evening")  # of one model, and of batch work
TURNS_COUNT = 6  # of hours that open or close, at most
REMOVED_S, FLOOR_S, REGISTERED_S = 15.0, 20.0, 30.0


class Interventions:
    def __init__(self, world: "World") -> None:
        self.world = world
        self.removed: set[str] = set()
        self.floors: dict[str, types.Floor] = {}
        self.registered: tuple[types.CapabilitySpec, ...] = ()
        self.compactions_count = 0
        self.is_open = dict.fromkeys(HOURS, True)

    def schedule(self, count: int, within_s: float) -> None:
        interventions = [
            self.pair, self.set_floor, self.remove, self.grow, self.register, self.bloat,
            self.compact,
        ]  # fmt: skip
        weights = [self.world.rng.random() for _ in interventions]
        for intervention in self.world.rng.choices(interventions, weights, k=count):
            self.world.later(within_s, intervention)
        dice = random.Random(self.world.seed)  # of its own: the other draws stay as they were
        for _ in range(dice.randrange(TURNS_COUNT)):
            self._turn_at(dice.uniform(0, within_s), dice.choice(HOURS), dice.random() < 0.5)
        for hours in HOURS:
            self._turn_at(within_s, hours, True)

    def _turn_at(self, at_s: float, hours: str, is_open: bool) -> None:
        def turn() -> None:
            self.is_open[hours] = is_open
            self.tell_hours()

        self.world.later(at_s, turn, exactly=True)

    def tell_hours(self) -> None:
        """What the clock on the wall says; a new arbiter is told before it has the table."""
        if self.world.arbiter is not None:
            now = self.is_open.items()
            readings = tuple(ev.HoursReading(h, is_open, seconds(20)) for h, is_open in now)
            self.world.feed(ev.HoursRead(readings))

    def pair(self) -> None:
        """Two models that only make sense together."""
        living = [
            h for h in self.world.holders.values()
            if h.alive and h.capability == "text" and not isinstance(h, LeaseHolder)
        ]  # fmt: skip
        if living:
            self.world.rng.choice(living).want_together(PAIR)

    def grow(self) -> None:
        """A resident wants more for a while."""
        living = [
            h for h in self.world.holders.values() if h.alive and not isinstance(h, LeaseHolder)
        ]
        able = [
            (h, t) for h in living for t in h.held.values()
            if t.phase is types.Phase.RESIDENT and not t.is_barred and not t.wants_bytes
        ]  # fmt: skip
        if able:
            holder, ticket = self.world.rng.choice(able)
            holder.want_more(ticket)

    def bloat(self) -> None:
        """A resident that was in use keeps more than its grant, until its process ends."""
        able = [
            t.engine for h in self.world.holders.values() if h.alive for t in h.held.values()
            if t.phase is types.Phase.RESIDENT and t.engine and t.uses_count
        ]  # fmt: skip
        if able:
            self.world.rng.choice(able).take_more(BLOAT_SHARE)

    def compact(self) -> None:
        """A person asks for it, by name or not."""
        if self.world.arbiter is None:
            return
        names = self.world.rng.sample(MOVABLE, self.world.rng.randrange(3))
        models = tuple(types.ModelName("text", m) for m in names if m not in self.removed)
        self.compactions_count += 1
        self.world.feed(ev.CompactAsked(f"c{self.compactions_count}", models))

    def unfinished_compactions(self) -> list[str]:
        """Those that were asked for and are under way."""
        names = [f"c{number + 1}" for number in range(self.compactions_count)]
        arbiter = self.world.arbiter
        return [name for name in names if arbiter is not None and arbiter.compaction(name)]

    def set_floor(self) -> None:
        """For a while: one that nobody lowers again would keep its model for ever."""
        model = self.world.rng.choice(MOVABLE)
        self._floor(model, self.world.rng.choice(list(types.Floor)))
        self.world.later(FLOOR_S, lambda: self._floor(model, types.Floor.COLD))

    def _floor(self, model: str, floor: types.Floor) -> None:
        if model not in self.removed:
            self.floors[model] = floor
            if self.world.arbiter is not None:
                self.world.feed(ev.FloorSet("text", model, floor))

    def remove(self) -> None:
        """A model leaves the table, and comes back."""
        model = self.world.rng.choice(MOVABLE)
        self.removed.add(model)
        self.floors.pop(model, None)
        self._tell_table()
        self.world.later(REMOVED_S, lambda: self._restore(model))

    def _restore(self, model: str) -> None:
        self.removed.discard(model)
        self._tell_table()

    def _tell_table(self) -> None:
        if self.world.arbiter is not None:
            self.world.feed(self.world.table())

    def register(self) -> None:
        """Python registers a capability, sometimes with a floor, and removes it later."""
        if self.world.arbiter is None:
            return  # it would be told that the arbiter is away
        if not self.registered:
            floor = self.world.rng.choice([types.Floor.COLD, types.Floor.DEVICE])
            model = types.ModelSpec(EXTRA_MODEL, seconds(20), floor=floor)
            self.registered = (types.CapabilitySpec(EXTRA, "vad", "fake", (model,), seconds(60)),)
            self.world.later(REGISTERED_S, self.unregister)
        self.restore_registered()  # a second time it is repeated

    def unregister(self) -> None:
        if self.world.arbiter is None:
            self.world.later(1.0, self.unregister)
            return
        self.registered = ()
        self.world.feed(ev.CapabilityUnregistered(EXTRA))

    # -- what the shell keeps on disk ------------------------------------------------------------

    def restore_registered(self) -> None:
        for spec in self.registered:
            self.world.feed(ev.CapabilityRegistered(spec))

    def restore_floors(self) -> None:
        assert self.world.arbiter is not None
        rows = [["text", model, floor.value] for model, floor in sorted(self.floors.items())]
        self.world.arbiter.restore_floors(rows)
