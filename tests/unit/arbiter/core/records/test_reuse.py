"""What is learned of when models are wanted again: as the formulas say, at the same cost however
many models there are, and with nothing lost in a restart."""

import json
import random
from collections.abc import KeysView

import pytest

from arbiter.core.records.reuse import (
    BORN,
    FOLLOWERS_COUNT,
    TRIES_COUNT,
    ReuseLearner,
)
from arbiter.core.records.usage_rates import UsageCounts
from arbiter.core.types import ModelName
from tests.support.reference_reuse import Reference

NONE = UsageCounts()


def named(n: int) -> ModelName:
    return ModelName("text", f"m{n}")


def use(learner: ReuseLearner, n: int, size: float = 0.0, times: int = 1) -> None:
    """One request; with a size it needs a load of so many turnovers."""
    learner.wanted(named(n))
    if size:
        learner.ask_others(named(n), lambda _: NONE)
    learner.used(named(n), times)
    learner.loaded(size)


def drawn(seed: int, count: int) -> list[tuple[int, float, int]]:
    """Model, turnovers of its load if it has one, and uses: few models are asked for often."""
    rng = random.Random(seed)
    picked = (min(int(rng.paretovariate(0.7)) - 1, FOLLOWERS_COUNT - 1) for _ in range(count))
    return [(n, rng.choice((0, 0, 0.1, 0.5)), rng.randint(1, 3)) for n in picked]


@pytest.mark.spec("N4", "C3")
@pytest.mark.parametrize("seed", range(2))
def test_chances_are_those_of_the_formulas_after_any_history(seed: int) -> None:
    learner, reference = ReuseLearner(), Reference()
    rng = random.Random(seed)
    counts = {named(n): UsageCounts(*(rng.uniform(0, 9) for _ in range(4))) for n in range(16)}
    for n, size, times in drawn(seed, 250):
        name, elsewhere = named(n), size and rng.choice((0, 0, 0.05))
        learner.wanted(name)
        reference.wanted(name)
        if size:
            learner.ask_others(name, counts.__getitem__)
            reference.ask_others(name, counts.__getitem__)
        chances = {m: learner.reuse(m, counts[m]).chance for m in reference.models}
        wanted = {m: reference.chance(reference.features(m, counts[m])) for m in reference.models}
        assert chances == pytest.approx(wanted, rel=1e-9)
        learner.loaded(elsewhere)  # by other loads, which end before this one
        reference.clock += elsewhere
        learner.used(name, times)
        reference.used(name, times)
        learner.loaded(size)
        reference.clock += size
    assert reference.weights != pytest.approx(BORN, rel=0.1)  # it has learned


@pytest.mark.spec("N4")
def test_model_of_each_turnover_becomes_likelier_than_a_model_used_once() -> None:
    learner = ReuseLearner()
    use(learner, 0, 0.25)
    for n in range(1, 200):
        use(learner, 1, 0.25)
        use(learner, 1 + n, 0.25)
    often, once = (learner.reuse(named(n), NONE) for n in (1, 0))
    assert often.chance > 10 * once.chance
    assert "last used 0.5 turnovers ago" in str(often)


@pytest.mark.spec("N4")
def test_nothing_fades_while_nothing_loads() -> None:
    learner = ReuseLearner()
    for n in range(5):
        use(learner, n, 0.2)
    before = learner.reuse(named(0), NONE)
    for _ in range(1_000):
        use(learner, 4)
    assert learner.reuse(named(0), NONE) == before


@pytest.mark.spec("N4", "A18")
def test_learner_restored_from_its_json_goes_on_as_if_it_had_not_stopped() -> None:
    whole, stopped = ReuseLearner(), ReuseLearner()
    for n, size, times in drawn(1, 200):
        use(whole, n, size, times)
        use(stopped, n, size, times)
    again = ReuseLearner()
    again.restore(json.loads(json.dumps(stopped.export())))
    for n, size, times in drawn(2, 200):
        use(whole, n, size, times)
        use(again, n, size, times)
    assert again.export() == whole.export()


@pytest.mark.spec("N4")
def test_forgotten_model_leaves_no_trace_but_in_the_weights() -> None:
    learner = ReuseLearner()
    for n, size, times in drawn(3, 200):
        use(learner, n, size, times)
    learner.forget(named(1))
    assert 'm1"' not in json.dumps(learner.export())
    for n, size, times in drawn(4, 200):
        use(learner, n, size, times)


class Counted(dict[ModelName, int]):
    """Followers of a model, which count how often they are looked through."""

    looks_count = 0

    def keys(self) -> KeysView[ModelName]:
        Counted.looks_count += 1
        return super().keys()


@pytest.mark.spec("N2", "N4")
def test_models_forgotten_together_are_as_if_one_by_one_and_looked_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for gone in ([1], [0, 2, 5, 9], list(range(12)), list(range(FOLLOWERS_COUNT))):
        singly, together = ReuseLearner(), ReuseLearner()
        for n, size, times in drawn(5, 300):
            use(singly, n, size, times)
            use(together, n, size, times)
        for n in gone:
            singly.forget(named(n))
        for uses in together._models.values():
            uses.followers = Counted(uses.followers)
        monkeypatch.setattr(Counted, "looks_count", 0)
        together.forget(*map(named, gone))
        assert Counted.looks_count == len(together._models)
        assert together.export() == singly.export()


@pytest.mark.spec("N2", "N4")
def test_what_is_kept_of_a_model_and_looked_at_with_a_load_is_bounded() -> None:
    learner = ReuseLearner()
    for n in range(300):
        use(learner, 0)
        use(learner, 1 + n, 1e-4)
    [row] = [row for row in learner.export()["models"] if row[1] == "m0"]
    assert len(row[6]) == FOLLOWERS_COUNT
    looked: list[ModelName] = []
    for _ in range(200):  # until nearly all are asked already
        looked.clear()
        learner.ask_others(named(0), lambda name: looked.append(name) or NONE)
    assert len(looked) <= TRIES_COUNT


@pytest.mark.spec("N4", "A18")
@pytest.mark.parametrize(
    "damage",
    [
        {"weights": [0.0]},
        {"covariance": [[1.0]]},
        {"clock": float("nan")},
        {"recent": [["a", "b"]]},
    ],
    ids=lambda damage: next(iter(damage)),
)
def test_damaged_values_are_left_out_and_it_learns_anew(damage: dict[str, object]) -> None:
    before = ReuseLearner()
    for n, size, times in drawn(3, 40):
        use(before, n, size, times)
    after = ReuseLearner()
    after.restore(before.export() | damage)
    assert after.export() == ReuseLearner().export()
    after.restore(before.export())
    assert after.export() == before.export()


@pytest.mark.spec("N4", "A18")
@pytest.mark.parametrize("soon", [0.1, None])
def test_weights_that_answer_another_question_are_left_out_and_the_uses_are_not(
    soon: float | None,
) -> None:
    before, after, young = ReuseLearner(), ReuseLearner(), ReuseLearner().export()
    for n, size, times in drawn(4, 40):
        use(before, n, size, times)
    after.restore(before.export() | {"soon": soon})
    kept = before.export()
    assert kept["weights"] != young["weights"] and kept["covariance"] != young["covariance"]
    learned = {name: young[name] for name in ("weights", "covariance")}
    assert after.export() == kept | learned
