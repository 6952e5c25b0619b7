"""What the rounds of a capability add up to."""

from benchmarks import first_answer, private_bytes
from benchmarks.first_token import shipped, table_of

ROWS = [
    {"zero_replicas": 2.0, "engine_gone": 1.0, "warm": 0.5, "bare": 4.0, "bare_answer": 1.0},
    {"zero_replicas": 3.0, "engine_gone": 1.0, "warm": 0.5, "bare": 10.0, "bare_answer": 0.5},
    {"zero_replicas": 4.0, "engine_gone": 1.0, "warm": 0.5, "bare": 8.0, "bare_answer": 0.5},
]


def test_ratios_are_taken_round_by_round_and_held_against_the_bar() -> None:
    found = first_answer.figures_of(ROWS)
    assert found["zero_replicas_s"].values == (2.0, 3.0, 4.0)
    assert found["zero_replicas_ratio"].values == (0.5, 0.3, 0.5)
    assert found["engine_gone_ratio"].median == 0.125
    assert found["answer_ratio"].values == (0.5, 1.0, 1.0)
    assert (found["engine_gone_meets_bar"], found["zero_replicas_meets_bar"]) == (True, False)


def test_only_models_that_fall_asleep_stay_for_it() -> None:
    config = shipped(3, 8)
    models = table_of(config)["capabilities"]
    models["tts"]["models"]["joe"].pop("can_sleep")
    assert "joe" in private_bytes.models_that_sleep(table_of(config))
    assert models["tts"]["models"]["joe"]["keep_warm_s"] == private_bytes.ASLEEP_S
    assert "keep_warm_s" not in models["asr"]["models"]["tiny.en"]
