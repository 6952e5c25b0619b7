"""A wrong key is named and nothing starts."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from arbiter.units import GIB, MIB, seconds
from deployments.config.boot import as_plain
from deployments.config.config_file import check_file
from deployments.config.fields import parse_size
from deployments.config.schema import ConfigError, Table, parse_table
from deployments.config.voice_files import voices

SHIPPED = Path(__file__).parents[4] / "serve_config.yaml"


def shipped() -> dict[str, Any]:
    return copy.deepcopy(yaml.safe_load(SHIPPED.read_text()))


def front_table(config: dict[str, Any]) -> dict[str, Any]:
    return config["applications"][0]["deployments"][0]["user_config"]


def refused(config: dict[str, Any], tmp_path: Path) -> str:
    file = tmp_path / "serve_config.yaml"
    file.write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError) as caught:
        check_file(file)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"), [("300 MiB", 300 * MIB), ("1.5GiB", 3 * GIB // 2), ("7 KB", 7_000), (12, 12)]
)
def test_sizes_are_read_with_their_units(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["300", "-1 MiB", "many", True, None, 1.5, "9" * 400 + " GiB", "2000000 TiB", 10**400]
)
def test_a_size_without_a_unit_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_the_shipped_configuration_is_good() -> None:
    table = check_file(SHIPPED)
    homes = {"small-chat": "chat", "all-minilm-l6-v2": "embedding"}
    assert homes.items() <= table.homes.items()
    assert {c.name for c in table.as_event().capabilities} == set(table.homes.values())


@pytest.mark.parametrize(
    "path", [("arbiter",), ("arbiter", "arenas"), ("capabilities", "chat")], ids=".".join
)
def test_an_unknown_key_in_the_table_is_named(path: tuple[str, ...], tmp_path: Path) -> None:
    config = shipped()
    place = front_table(config)
    for part in path:
        place = place[part]
    place["ceiling"] = 1
    message = refused(config, tmp_path)
    assert ".".join((*path, "ceiling")) in message


def test_a_key_that_serve_would_drop_in_silence_is_named(tmp_path: Path) -> None:
    config = shipped()
    config["applications"][0]["deployments"][0]["max_ongoing_request"] = 5
    assert "'max_ongoing_request'" in refused(config, tmp_path)


def test_application_without_a_name_has_serves_and_is_refused_by_it(tmp_path: Path) -> None:
    config = shipped()
    config["applications"].append({"import_path": "a:b", "route_prefix": "/own"})
    assert "application 'default' serves a capability not in the table" in refused(config, tmp_path)


def test_an_unknown_top_level_key_is_named(tmp_path: Path) -> None:
    assert "'http_option'" in refused(shipped() | {"http_option": {}}, tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("role", "painter", "no role 'painter'"),
        ("models", {}, "at least 1 item"),
        ("models", {"../etc": {"source": "x"}}, "model name"),
        ("keep_warm_s", -2, "greater than or equal to -1"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(
    key: str, value: object, says: str, tmp_path: Path
) -> None:
    config = shipped()
    front_table(config)["capabilities"]["chat"][key] = value
    message = refused(config, tmp_path)
    assert f"capabilities.chat.{key}" in message
    assert says in message


@pytest.mark.spec("C13", "F3", "G4", "G5")
def test_what_a_table_leaves_out_is_as_the_specification_has_it(tmp_path: Path) -> None:
    models = {"m": {"source": "x", "adapters": {"folder": str(tmp_path)}}}
    chat = {"role": "text", "engine": "vllm", "models": models}
    table = parse_table({"capabilities": {"chat": chat}})
    assert (table.arbiter.loading_most, table.arbiter.pool_sweep_s) == (0.3, 300)
    model = table.capabilities["chat"].models["m"]
    assert model.adapters is not None
    assert (model.rewarm_s, model.adapters.rebalance_s) == (240, 60)


@pytest.mark.spec("G4")
def test_pool_is_swept_at_most_once_a_minute(tmp_path: Path) -> None:
    config = shipped()
    front_table(config)["arbiter"]["pool_sweep_s"] = 59
    assert "greater than or equal to 60" in refused(config, tmp_path)


def test_an_unknown_policy_is_named_with_those_there_are(tmp_path: Path) -> None:
    config = shipped()
    front_table(config)["arbiter"]["evict"] = "random"
    assert "priority_lru" in refused(config, tmp_path)


@pytest.mark.spec("C11")
def test_a_pipeline_of_an_unknown_capability_is_named_with_those_there_are(tmp_path: Path) -> None:
    """By `arbiter check`, and by a front that starts or is given the table anew."""
    config = shipped()
    table = front_table(config)
    table["arbiter"]["pipelines"] = [["asr", "chat"], ["asr", "chatt", "tts"]]
    says = "arbiter.pipelines[1]: no capability 'chatt'; there is: asr, chat, embedding, "
    assert says in refused(config, tmp_path)
    with pytest.raises(ConfigError) as caught:
        parse_table(table)
    assert says in str(caught.value)
    table["arbiter"]["pipelines"][1].remove("chatt")
    assert parse_table(table).arbiter.pipelines == [["asr", "chat"], ["asr", "tts"]]


@pytest.mark.spec("C10")
@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"tenants": {"t": {"maximum": 5, "reserved": 6}}}, "arbiter.tenants.t.reserved"),
        ({"tenants": {"t": {"share": 0}}}, "arbiter.tenants.t.share"),
        ({"host_marks": {"high": 0.5}}, "low, 0.8, is above high, 0.5"),
        ({"device_marks": {"low": 0.95}}, "low, 0.95, is above high, 0.9"),
        ({"arenas": {"cpu": "9" * 400 + " GiB"}}, "arbiter.arenas.cpu"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_limit_that_makes_no_sense_is_refused_by_its_name(
    wrong: dict[str, object], named: str, tmp_path: Path
) -> None:
    config = shipped()
    front_table(config)["arbiter"].update(wrong)
    assert named in refused(config, tmp_path)


def test_model_belongs_to_one_capability(tmp_path: Path) -> None:
    config = shipped()
    capabilities = front_table(config)["capabilities"]
    capabilities["embedding"]["models"]["small-chat"] = {"source": "made:small-chat"}
    assert "'small-chat' is in both" in refused(config, tmp_path)


@pytest.mark.spec("M2")
def test_shipped_configurations_have_one_entry_per_capability() -> None:
    for name in ("serve_config.yaml", "serve_config.gpu.yaml", "serve_config.gpu80.yaml"):
        config = yaml.safe_load(SHIPPED.with_name(name).read_text())
        assert [one["name"] for one in config["applications"]] == ["front"]
        assert len(front_table(config)["capabilities"]) == 8


def test_capability_with_the_name_of_the_fronts_application_is_refused(tmp_path: Path) -> None:
    config = shipped()
    front_table(config)["capabilities"]["front"] = {
        "role": "text", "engine": "vllm", "models": {"m": {"source": "x"}}
    }  # fmt: skip
    assert "'front' has the name of the application of our own front" in refused(config, tmp_path)


@pytest.mark.parametrize("said", ["a.b:C", "rerank"])
def test_class_of_a_row_is_kept_by_the_arbiters_copy_of_the_table(said: str) -> None:
    chat = {"role": "text", "engine": "vllm", "class": said, "models": {"m": {"source": "x"}}}
    table = parse_table({"capabilities": {"chat": chat}})
    assert as_plain(table)["capabilities"]["chat"]["class"] == said
    assert parse_table(as_plain(table)) == table


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        check_file(tmp_path / "absent.yaml")


@pytest.mark.spec("C8")
def test_keep_warm_is_the_models_else_the_capabilitys_else_the_roles() -> None:
    def keep_warm(capability: dict[str, float], model: dict[str, float]) -> int:
        models = {"m": {"source": "x", **model}}
        raw = {"chat": {"role": "text", "engine": "vllm", "models": models, **capability}}
        [spec] = parse_table({"capabilities": raw}).as_event().capabilities
        return spec.models[0].keep_warm

    assert keep_warm({}, {}) == seconds(300)
    assert keep_warm({"keep_warm_s": 5}, {}) == seconds(5)
    assert keep_warm({"keep_warm_s": 5}, {"keep_warm_s": -1}) == seconds(-1)


def with_hours(arbiter: dict[str, Any], **of_m: object) -> Table:
    chat = {"role": "text", "engine": "vllm", "models": {"m": {"source": "x", **of_m}}}
    return parse_table({"arbiter": arbiter, "capabilities": {"chat": chat}})


@pytest.mark.spec("C13")
@pytest.mark.parametrize(
    ("hours", "zone", "means"),
    [
        ("22-07", "", "22:00-07:00"),
        (["22-07", "12:30-13"], "", "22:00-07:00, 12:30-13:00"),
        ("22-07", "Europe/Berlin", "22:00-07:00 Europe/Berlin"),
        ("22-07 UTC", "Europe/Berlin", "22:00-07:00 UTC"),
        ("", "Europe/Berlin", ""),
    ],
)
def test_hours_of_models_and_of_batch_work_are_read_in_the_zone_of_the_table(
    hours: object, zone: str, means: str
) -> None:
    arbiter = {"batch_hours": hours, "time_zone": zone}
    table = with_hours(arbiter, hours=hours, batch_hours=hours)
    for read in (table, parse_table(as_plain(table))):  # as the arbiter keeps it
        [spec] = read.as_event().capabilities
        assert (spec.models[0].hours, spec.models[0].batch_hours) == (means, means)
        assert read.arbiter.as_settings().batch_hours == means


@pytest.mark.spec("C13")
@pytest.mark.parametrize(
    ("arbiter", "model", "says"),
    [
        ({}, {"hours": "night"}, "chat.models.m.hours: Value error, 'night' is not a window"),
        ({}, {"hours": ["22-07", 7]}, "are no hours; write 22-07"),
        ({}, {"batch_hours": "0-24"}, "batch_hours: .* is the whole day"),
        ({"time_zone": "Mars"}, {}, "arbiter.time_zone: Value error, no time zone 'Mars'"),
        ({"batch_hours": 22}, {}, "arbiter.batch_hours: Value error, 22 are no hours"),
    ],
)
def test_what_are_no_hours_is_refused_by_its_key(
    arbiter: dict[str, Any], model: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        with_hours(arbiter, **model)


@pytest.mark.spec("E1")
@pytest.mark.parametrize("name", ["c" * 65, "ü", "a/b", ""])
def test_name_of_a_capability_that_no_slab_could_bear_is_refused(name: str) -> None:
    chat = {"role": "text", "engine": "vllm", "models": {"m": {"source": "x"}}}
    assert parse_table({"capabilities": {"c" * 64: chat}})
    with pytest.raises(ConfigError, match=r"user_config\.capabilities: .*at most 64 letters"):
        parse_table({"capabilities": {name: chat}})


@pytest.mark.parametrize("value", ["inf", "1e308"])
@pytest.mark.parametrize("field", ["load_timeout_s", "bypass_s", "lease_term_most_s"])
def test_a_time_that_does_not_fit_is_refused_by_name(field: str, value: str) -> None:
    models = {"m": {"source": "x"}}
    chat = {"role": "text", "engine": "vllm", "models": models}
    with pytest.raises(ConfigError, match=field):
        parse_table({"arbiter": {field: float(value)}, "capabilities": {"chat": chat}})


@pytest.mark.parametrize("arguments", ["engine_args", "grow_to"])
@pytest.mark.parametrize("size", ["100 megs", None, 1.5e9])
def test_an_engine_argument_that_is_no_size_is_named_before_anything_loads(
    arguments: str, size: object
) -> None:
    models = {"m": {"source": "x", arguments: {"kv_cache_memory_bytes": size}}}
    chat = {"role": "text", "engine": "vllm", "models": models}
    with pytest.raises(ConfigError, match=rf"{arguments}.*kv_cache_memory_bytes.*is not a size"):
        parse_table({"capabilities": {"chat": chat}})


@pytest.mark.parametrize("tokens", ["32k", None, 0, True, 1.5])
def test_a_context_to_grow_to_is_a_number_of_tokens(tokens: object) -> None:
    models = {"m": {"source": "x", "grow_to": {"max_model_len": tokens}}}
    chat = {"role": "text", "engine": "vllm", "models": models}
    with pytest.raises(ConfigError, match=r"grow_to.*max_model_len.*is not a number of tokens"):
        parse_table({"capabilities": {"chat": chat}})


@pytest.mark.spec("H4")
@pytest.mark.parametrize("given", [{}, {"models": {}}, {"models": None}])
def test_capability_that_speaks_without_a_model_has_espeak(given: dict[str, Any]) -> None:
    tts = {"role": "tts", "engine": "vits", **given}
    table = parse_table({"capabilities": {"tts": tts}})
    assert table.homes == {"espeak": "tts"}
    model = table.capabilities["tts"].models["espeak"]
    assert (model.source, voices("espeak", model)) == ("espeak-ng", ["en-us", "alloy"])
    assert parse_table(table.model_dump(mode="json")) == table


@pytest.mark.spec("H4")
@pytest.mark.parametrize("other", [{"role": "asr"}, {"engine": "faster_whisper"}])
def test_other_capability_without_a_model_is_refused(other: dict[str, Any]) -> None:
    tts = {"role": "tts", "engine": "vits"} | other
    with pytest.raises(ConfigError, match=r"capabilities\.tts\.models: Field required"):
        parse_table({"capabilities": {"tts": tts}})


@pytest.mark.spec("G1", "G5")
@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"stable_prefixes": [{}]}, "`system`, `messages` or `tools`"),
        ({"stable_prefixes": [{"system": "x", "adapters": "y"}]}, "adapters"),
        ({"stable_prefixes": [{"system": "x"}] * 33}, "at most 32"),
        ({"rewarm_s": 29}, "greater than or equal to 30"),
    ],
)
def test_wrong_stable_prefix_is_named(model: dict[str, Any], says: str) -> None:
    chat = {"role": "text", "engine": "vllm", "models": {"m": {"source": "x", **model}}}
    with pytest.raises(ConfigError, match=says):
        parse_table({"capabilities": {"chat": chat}})
