"""What is known of a model before its first load."""

import asyncio
import threading
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arbiter.core.types import DeviceBytes, Split
from arbiter.units import MIB, Bytes, DeviceId
from deployments.config import engine_kinds, load_plan, model_files
from deployments.config.capability_section import CapabilityConfig
from deployments.config.schema import ConfigError
from tests.support.adapters import write
from tests.support.few_threads import few_threads, is_free
from tests.support.model_files import safetensors
from tests.support.waits import eventually


def capability(source: str, **model: object) -> CapabilityConfig:
    models = {"m": {"source": source, **model}}
    return CapabilityConfig.model_validate({"role": "text", "engine": "x:build", "models": models})


@pytest.mark.spec("A17")
@pytest.mark.spec("A17")
def test_settings_key_outlives_a_move_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    safetensors(tmp_path, "a.safetensors", 100)
    table = capability(str(tmp_path)).model_copy(update={"engine": "vllm"})
    before = load_plan.plan("m", table)
    moved = replace(engine_kinds.ENGINES["vllm"], entry="elsewhere.vllm:build")
    monkeypatch.setitem(engine_kinds.ENGINES, "vllm", moved)
    after = load_plan.plan("m", table)
    assert after.entry != before.entry and after.settings_key == before.settings_key
    other = table.model_copy(update={"engine": "sentence_transformers"})
    assert load_plan.plan("m", other).settings_key != before.settings_key


@pytest.mark.spec("A17")
def test_an_explicit_need_wins_over_the_files(tmp_path: Path) -> None:
    need = {"weights": "3 MiB", "working": "1 MiB"}
    got = load_plan.plan("m", capability(str(tmp_path), need=need))
    assert got.need_is_explicit
    assert got.need.device_bytes == 4 * MIB
    assert got.need.host_bytes == 3 * MIB


def test_kv_cache_in_the_engine_arguments_is_part_of_the_working_set(tmp_path: Path) -> None:
    safetensors(tmp_path, "a.safetensors", 100)
    got = load_plan.plan(
        "m", capability(str(tmp_path), engine_args={"kv_cache_memory_bytes": "2 MiB"})
    )
    assert got.need.working_bytes == 2 * MIB + engine_kinds.engine_kind("x:build").working_bytes
    assert got.config["engine_args"] == {"kv_cache_memory_bytes": 2 * MIB}


def test_other_engine_settings_are_another_key(tmp_path: Path) -> None:
    safetensors(tmp_path, "a.safetensors", 100)
    keys = {
        load_plan.plan("m", capability(str(tmp_path), engine_args=args)).settings_key
        for args in ({}, {"max_num_seqs": 1}, {"max_num_seqs": 2}, {"max_num_seqs": 2})
    }
    assert len(keys) == 3


@pytest.mark.parametrize("need", [None, {"weights": "3 MiB"}])
def test_a_model_that_cannot_sleep_claims_no_host_memory(
    tmp_path: Path, need: dict[str, str] | None
) -> None:
    safetensors(tmp_path, "a.safetensors", 100)
    table = capability(str(tmp_path), can_sleep=False, need=need)
    assert load_plan.plan("m", table).need.host_bytes == 0


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("made:absent-model", "make models"),
        ("package:absent_package", "pip install"),
        ("package:absent_package.voice", "'absent_package.voice' is not installed"),
        ("package:", "pip install"),
    ],
)
def test_a_missing_source_says_how_to_get_it(source: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_plan.resolve(source)


@pytest.mark.parametrize("value", ["many", None, [4], float("nan"), float("inf"), -1])
@pytest.mark.parametrize("key", ["max_num_seqs", "max_num_batched_tokens", "mm_processor_cache_gb"])
def test_engine_argument_that_is_no_number_is_refused_by_its_key(
    tmp_path: Path, key: str, value: object
) -> None:
    model = write(tmp_path / "model", {"layers.0.up_proj": (64, 16)})
    (model / "config.json").write_text('{"vision_config": {}, "hidden_size": 16}')
    given = {"adapters": {"folder": str(tmp_path)}, "engine_args": {key: value}}
    with pytest.raises(ConfigError, match=f"`engine_args.{key}`: .* is no number"):
        load_plan.plan("m", capability(str(model), **given))


@pytest.mark.spec("A18")
async def test_plan_that_waits_for_a_file_server_is_made_once_and_delays_no_other_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, begun, make = threading.Event(), [], load_plan.plan

    def planned(model: str, config: CapabilityConfig) -> load_plan.ModelPlan:
        begun.append(model)
        assert model != "a" or may_end.wait(60)
        return make(model, config)

    monkeypatch.setattr(load_plan, "plan", planned)
    need = {"weights": "3 MiB"}
    models = {name: {"source": str(tmp_path / name), "need": need} for name in ("a", "b")}
    row = {"role": "text", "engine": "x:build", "models": models}
    plans = load_plan.Plans("chat")
    plans.take({"capabilities": {"chat": row}})
    with few_threads():
        waiting = [asyncio.ensure_future(plans.of("a")) for _ in range(6)]
        try:
            await eventually(lambda: "a" in begun)
            assert (await asyncio.wait_for(plans.of("b"), 60)).model == "b"
            assert await is_free()
            waiting.pop().cancel()
        finally:
            may_end.set()
        assert {made.model for made in await asyncio.gather(*waiting)} == {"a"}
    assert begun == ["a", "b"]


@pytest.mark.spec("A18")
async def test_plan_that_was_being_made_when_files_were_replaced_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, sizes, make = threading.Event(), [], load_plan.plan

    def planned(model: str, config: CapabilityConfig) -> load_plan.ModelPlan:
        made = make(model, config)
        sizes.append(made.need.weights_bytes)
        assert may_end.wait(60)
        return made

    monkeypatch.setattr(load_plan, "plan", planned)
    plans = load_plan.Plans("chat")
    row = {"role": "text", "engine": "x:build", "models": {"m": {"source": str(tmp_path)}}}
    safetensors(tmp_path, "a.safetensors", 100)
    plans.take({"capabilities": {"chat": row}})
    waiting = asyncio.ensure_future(plans.of("m"))
    try:
        await eventually(lambda: bool(sizes))
        safetensors(tmp_path, "a.safetensors", 1000)
        plans.forget("m")
    finally:
        may_end.set()
    assert (await waiting).need.weights_bytes == sizes[-1] > sizes[0]
    assert (await plans.of("m")) is await waiting


class Looked(asyncio.Future[load_plan.ModelPlan]):
    """Fails where it is awaited again and again while it is done: no other task would run."""

    looks_count = 0

    def __await__(self) -> Generator[Any, None, load_plan.ModelPlan]:
        self.looks_count += 1
        assert self.looks_count < 5, "asked in a loop that never ends"
        return (yield from super().__await__())

    __iter__ = __await__


@pytest.mark.spec("A18")
async def test_plan_that_is_asked_for_in_the_moment_in_which_it_is_made_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who asked before have not been told yet."""
    plans, making = load_plan.Plans("chat"), Looked()
    row = {"role": "text", "engine": "x:build", "models": {"m": {"source": str(tmp_path)}}}
    plans.take({"capabilities": {"chat": row}})
    safetensors(tmp_path, "a.safetensors", 100)
    made = load_plan.plan("m", capability(str(tmp_path)))
    monkeypatch.setattr(load_plan, "in_thread", lambda *_: making)
    before = asyncio.ensure_future(plans.of("m"))
    await asyncio.sleep(0)  # it waits
    making.set_result(made)
    assert (await plans.of("m")) is made
    assert (await before) is made


@pytest.mark.spec("F2")
def test_adapter_slots_are_what_their_share_of_the_weights_pays_for(tmp_path: Path) -> None:
    model = write(tmp_path / "model", {f"layers.{n}.up_proj": (64, 16) for n in range(40)})
    one = model_files.slot_size(str(model), 8)
    assert one == 8 * 2 * 40 * (64 + 8 + 8 + 16)
    given = {"folder": str(tmp_path / "in"), "max_rank": 8}
    got = load_plan.plan("m", capability(str(model), adapters={**given, "slot_share": 4.0}))
    slots = got.config["adapters"]["slots"]
    assert slots == 4 * model_files.weights_bytes(model) // one > 1
    plain = load_plan.plan("m", capability(str(model)))
    assert got.need.working_bytes - plain.need.working_bytes == 2 * slots * one
    few = load_plan.plan("m", capability(str(model), adapters={**given, "slots": 3}, threads=2))
    assert (few.config["adapters"]["slots"], few.config["threads"]) == (3, 2)
    bounded = {"adapters": {**given, "slot_share": 4.0}, "engine_args": {"max_num_seqs": 2}}
    assert load_plan.plan("m", capability(str(model), **bounded)).config["adapters"]["slots"] == 2


@pytest.mark.spec("B2")
def test_dispatch_lock_reaches_only_an_engine_that_uses_one(tmp_path: Path) -> None:
    safetensors(tmp_path, "a.safetensors", 100)
    given = {"source": str(tmp_path), "dispatch": {"lock": "torch", "scratch": "64 MiB"}}
    table = {"role": "embedding", "engine": "sentence_transformers", "models": {"m": given}}
    config = CapabilityConfig.model_validate(table)
    assert load_plan.plan("m", config).config["dispatch_lock"] == "torch"
    assert load_plan.plan("m", config).need.scratch_bytes == 0
    spec = config.as_spec("e", 300.0).models[0]
    assert (spec.dispatch_lock, spec.shared_scratch_bytes) == ("torch", 64 * MIB)
    with pytest.raises(ConfigError, match="no `dispatch` lock"):
        load_plan.plan("m", capability(str(tmp_path), dispatch=given["dispatch"]))


@pytest.mark.spec("B5")
def test_an_engine_is_told_its_parts_in_the_order_in_which_it_sees_its_gpus() -> None:
    parts = [DeviceBytes(DeviceId(f"n/gpu:{number}"), Bytes(number)) for number in (10, 2)]
    assert load_plan.parts(tuple(parts)) == {"parts": [2, 10]}
    assert load_plan.parts(tuple(parts[:1])) == load_plan.parts(()) == {}
    assert engine_kinds.engine_kind("vllm").split is Split.EQUAL
    assert engine_kinds.engine_kind("sentence_transformers").split is Split.PROPORTIONAL


@pytest.mark.spec("D4")
def test_model_that_shares_a_host_copy_has_no_host_ram_of_its_own(tmp_path: Path) -> None:
    safetensors(tmp_path, "a.safetensors", 3 * MIB)
    own = load_plan.plan("m", capability(str(tmp_path)))
    assert own.copy is None and own.need.host_bytes == own.need.weights_bytes
    shared = load_plan.plan("m", capability(str(tmp_path), host_copy="shared"))
    group = load_plan.plan("m", capability(str(tmp_path), host_copy="group"))
    assert shared.copy and group.copy
    assert (shared.copy.folder, shared.copy.for_group) == (str(tmp_path), False)
    assert group.copy == replace(shared.copy, for_group=True)
    assert shared.need == replace(own.need, host_bytes=load_plan.OWN_BYTES)
    assert shared.config["host_copy"] == {"own_bytes": load_plan.OWN_BYTES}
    assert shared.settings_key != own.settings_key
    cold = load_plan.plan("m", capability(str(tmp_path), host_copy="shared", can_sleep=False))
    assert cold.copy and cold.need.host_bytes == 0


@pytest.mark.spec("D4")
def test_host_copy_is_refused_where_it_cannot_be_shared(tmp_path: Path) -> None:
    safetensors(tmp_path, "a.safetensors", 100)
    voice = capability(str(tmp_path), host_copy="shared").model_copy(update={"engine": "vits"})
    with pytest.raises(ConfigError, match="'vits' keeps host copies private"):
        load_plan.plan("m", voice)
    with pytest.raises(ConfigError, match="'hub/id', which is no folder"):
        load_plan.plan("m", capability("hub/id", host_copy="shared", need={"weights": 1}))
    with pytest.raises(ValueError, match="host_copy"):
        capability(str(tmp_path), host_copy="everybody")
