"""Adapters that are cold, warm or hot give the same tokens, also to the next engine (F3)."""

import contextlib
import json
import mmap
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from arbiter.pool import Removal, SlabView
from arbiter.pool.layout import SHARED, tenant_digest
from arbiter.units import MIB, Bytes, Content
from benchmarks import adapter_zipf
from deployments.messages import ADAPTERS, TENANT_HEADER
from tests.support.engine_host import (
    Child,
    Connection,
    ZygoteUnderTest,
    killed,
    served,
    until,
)
from tests.support.slabs import lent_slab, path_of

VLLM = "deployments.engines.vllm.engine:build"
SLOTS = 2
NAMES = tuple(f"a{i}" for i in range(6))
PROMPT = [(i * 37) % 2000 + 3 for i in range(40)]


@pytest.fixture
def slab() -> Iterator[int]:
    with lent_slab(128 * MIB) as fd:
        yield fd


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny.parent / f"{tiny.name}-adapters", tmp_path / "in")
    return tmp_path


def config(model: Path, folder: Path, slab: int | None, rank: int = 16) -> dict[str, Any]:
    adapters = {"folder": str(folder / "in"), "store": str(folder / "store"), "max_rank": rank}
    args = {"dtype": "float32", "kv_cache_memory_bytes": 64 * MIB, "max_model_len": 1024}
    given: dict[str, Any] = {
        "model": str(model),
        "served_name": "tiny",
        "adapters": {**adapters, "slots": SLOTS, "wait_s": 30.0},
        "engine_args": {**args, "max_num_seqs": 16, "enable_prefix_caching": False},
    }
    if slab is not None:
        given["slabs"] = {Content.ADAPTER.value: {"path": path_of(slab)}}
    return given


def tokens(child: Child, name: str, tenant: str = "") -> list[int]:
    status, got = answer(child, name, tenant)
    assert status == 200, got
    found: list[int] = got["choices"][0]["token_ids"]
    return found


def answer(child: Child, name: str, tenant: str) -> tuple[int, Any]:
    body = {"model": name, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    return child.call("POST", "/v1/completions", body, {TENANT_HEADER: tenant} if tenant else None)


def give_own_adapter(folder: Path, tenant: str) -> None:
    """Puts an adapter `own` into the tenant's catalogue, unlike every other one."""
    own = folder / "in" / f"@{tenant}" / "own"
    shutil.copytree(folder / "in" / NAMES[0], own)
    settings = own / "adapter_config.json"
    said = json.loads(settings.read_text())
    settings.write_text(json.dumps({**said, "lora_alpha": 2 * said["lora_alpha"]}))


def all_tokens(child: Child) -> dict[str, list[int]]:
    """One after the other: with two slots each adapter takes the slot of an earlier one."""
    return {name: tokens(child, name) for name in NAMES}


def facts(child: Child) -> dict[str, int]:
    found: dict[str, int] = child.call("GET", "/slab")[1]["adapter"]
    return found


def all_at_once(child: Child) -> dict[str, list[int]]:
    """More adapters than slots in one batch after the other, with the base among them."""
    names = ("tiny", *NAMES)
    with ThreadPoolExecutor(len(names)) as pool:
        return dict(zip(names, pool.map(lambda name: tokens(child, name), names), strict=True))


def tiers(child: Child) -> Any:
    return child.call("GET", "/adapters")[1]["tiers"]


def spoil_copies(folder: Path) -> None:
    """What of an adapter lies on disk and would be loaded is of no use from now on."""
    for weights in (folder / "store").glob("*/adapter_model.safetensors"):
        weights.chmod(0o600)
        weights.write_bytes(b"no weights")


@pytest.fixture(scope="module")
def right(
    engines: ZygoteUnderTest, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[int]]:
    """What an engine without a slab answers."""
    made = tmp_path_factory.mktemp("plain")
    shutil.copytree(tiny.parent / f"{tiny.name}-adapters", made / "in")
    with served(engines, "plain", VLLM, config(tiny, made, None)) as child:
        found = all_tokens(child) | {"tiny": tokens(child, "tiny")}
        assert child.call("GET", "/slab")[0] == 404
    assert len({tuple(one) for one in found.values()}) == len(found)
    return found


@pytest.mark.spec("E6", "E7", "E10", "F2", "F3", "F4", "F10")
def test_answers_are_equal_cold_warm_and_hot_and_in_the_next_engine_without_the_files(
    engines: ZygoteUnderTest,
    tiny: Path,
    folder: Path,
    slab: int,
    right: dict[str, list[int]],
) -> None:
    alone = {name: right[name] for name in NAMES}
    with killed(engines, "images", VLLM, config(tiny, folder, slab)) as child:
        assert all_at_once(child) == right, "cold, made ahead while their requests waited"
        said = tiers(child)
        assert (said["requests"]["cold"], said["staged_ahead"] > 0) == (len(NAMES), True), said
        assert said["adapters"]["hot"] == SLOTS and said["adapters"]["warm"] == len(NAMES) - SLOTS
        spoil_copies(folder)
        assert all_tokens(child) == alone, "warm"
        assert tokens(child, NAMES[-1]) == right[NAMES[-1]], "hot"
        assert tiers(child)["requests"]["cold"] == len(NAMES)
        assert tiers(child)["top"][0] == {"adapter": f"tiny:{NAMES[-1]}", "tier": "hot", "uses": 3}
        assert child.call("POST", "/control/sleep")[0] == 200
        assert child.call("POST", "/control/wake")[1]["verified"] is True
        assert all_at_once(child) == right
    with served(engines, "next-images", VLLM, config(tiny, folder, slab)) as child:
        assert all_at_once(child) == right
        assert all_tokens(child) == alone
        assert tiers(child)["requests"]["cold"] == 0 and tiers(child)["hit_rate"] == 1.0
        give_own_adapter(folder, "acme")
        assert tokens(child, "own", "acme") not in right.values()
        assert answer(child, "own", "other")[0] == answer(child, "own", "")[0] == 404
        with contextlib.closing(SlabView(slab)) as view:
            tenants = Counter(mark.tenant for _, mark in view.marks())
            assert tenants == {SHARED: len(NAMES), tenant_digest("acme"): 1}
            assert view.order_erasure(Removal(tenant_digest("acme")))
            assert child.call("POST", "/control/shrink_slabs") == (200, {"shrinks": True})
            assert not view.must_erase
            assert (view.content, view.ready_count) == (Content.ADAPTER, len(NAMES))
            view.limit_bytes = Bytes(0)
        assert child.call("POST", "/slab")[1]["adapter"]["ready"] == 0
        assert os.fstat(slab).st_blocks * 512 < 4 * MIB
        shutil.rmtree(folder / "store")
        (folder / "store").mkdir()
        assert all_tokens(child) == alone, "without room in the slab"


@pytest.mark.spec("F3")
def test_adapter_of_8_bits_is_the_same_in_every_tier_and_no_more_stay_warm_than_may(
    engines: ZygoteUnderTest, tiny: Path, folder: Path, slab: int, right: dict[str, list[int]]
) -> None:
    shutil.copytree(folder / "in" / NAMES[0], folder / "in" / "rounded")
    (folder / "in" / "rounded" / "serve.json").write_text('{"int8": true}')
    given = config(tiny, folder, slab)
    given["slabs"][Content.ADAPTER.value]["rows"] = 3
    with served(engines, "rounded", VLLM, given) as child:
        cold = tokens(child, "rounded")
        for name in NAMES[:SLOTS]:
            assert tokens(child, name) == right[name]
        copies = list((folder / "store").glob("*/adapter_model.safetensors"))
        assert len(copies) == SLOTS + 1, "what is rounded has a copy of its own"
        spoil_copies(folder)
        assert tokens(child, "rounded") == tokens(child, "rounded") == cold
        assert tiers(child)["requests"] == {"hot": 1, "warm": 1, "cold": 3}
        for name in NAMES[SLOTS:]:
            assert tokens(child, name) == right[name]
        assert (facts(child)["ready"], facts(child)["evicted"]) == (3, len(NAMES) + 1 - 3)
        found = tiers(child)
        assert sum(found["adapters"][tier] for tier in ("hot", "warm")) == 3


@pytest.mark.spec("E7", "F3")
async def test_nine_tenths_of_a_zipf_load_on_an_engine_need_no_file(
    engines: ZygoteUnderTest, tiny: Path, tmp_path: Path, slab: int
) -> None:
    """Once the load has gone on for a while: each adapter is cold at its first request only."""
    names = adapter_zipf.make_adapters(tmp_path / "in", tiny, 60)
    wanted = adapter_zipf.zipf(names, 450, seed=1)
    with killed(engines, "zipf", VLLM, adapter_zipf.config(tiny, tmp_path, slab)) as child:
        first = await adapter_zipf.serve(child, wanted[:325], seed=1, tokens=1)
        later = await adapter_zipf.serve(child, wanted[325:], seed=1, tokens=1)
        assert first.requests["cold"] + later.requests["cold"] == len(set(wanted))
        assert sum(later.requests.values()) == 125 and later.hit_rate > 0.9, later
        said = len(wanted) - len(set(wanted))
        assert later.requests["hot"] and later.requests["warm"] > later.requests["cold"]
        with contextlib.closing(SlabView(slab)) as view:
            until(lambda: view.counts.misses_count == len(set(wanted)), 60)
            until(lambda: view.counts.hot_hits_count + view.counts.hits_count == said, 60)
            assert view.counts.stored_count == len(set(wanted)) and not view.counts.evicted_count


@pytest.mark.spec("E6")
def test_slot_of_a_removed_tenants_adapter_is_empty_at_once_or_after_its_last_request(
    engines: ZygoteUnderTest, tiny: Path, folder: Path, right: dict[str, list[int]]
) -> None:
    """Also without a slab, which would tell the core of the removal."""
    give_own_adapter(folder, "acme")

    def removed() -> None:
        said = child.call("POST", "/control/forget_tenant", {"tenant": "acme"})
        assert said == (200, {"forgets": True})

    def found() -> dict[str, int]:
        counts: dict[str, int] = tiers(child)["requests"]
        return counts

    with served(engines, "removed", VLLM, config(tiny, folder, None)) as child:
        mine = tokens(child, "own", "acme")
        assert tokens(child, NAMES[0]) == right[NAMES[0]]
        assert tokens(child, "own", "acme") == mine and found() == {"hot": 1, "warm": 0, "cold": 2}
        removed()
        assert tiers(child)["adapters"]["hot"] == 1, "that of another one stays"
        assert tokens(child, "own", "acme") == mine and found()["cold"] == 3
        stream = opened(child, "own", "acme")
        removed()
        assert tokens(child, "own", "acme") == mine and found()["cold"] == 3, "it is in use"
        stream.close()
        until(lambda: not child.call("GET", "/adapters")[1]["running"], 60)
        assert tokens(child, "own", "acme") == mine and found()["cold"] == 4
        assert tokens(child, NAMES[0]) == right[NAMES[0]] and found()["cold"] == 4


@pytest.mark.spec("F3", "K4")
def test_engine_says_in_which_tier_each_adapter_is_as_it_now_lies_in_the_catalogue(
    engines: ZygoteUnderTest, tiny: Path, folder: Path, slab: int
) -> None:
    give_own_adapter(folder, "acme")

    def said(*names: str, tenant: str = "") -> dict[str, str]:
        body, headers = {"names": [f"tiny:{name}" for name in names]}, {TENANT_HEADER: tenant}
        found: dict[str, str] = child.call("POST", ADAPTERS, body, headers)[1]["tiers"]
        return {name.removeprefix("tiny:"): tier for name, tier in found.items()}

    with killed(engines, "told", VLLM, config(tiny, folder, slab)) as child:
        for name in NAMES[:3]:
            tokens(child, name)
        there = {NAMES[1]: "hot", NAMES[2]: "hot"}
        assert said(NAMES[0], NAMES[3], "unknown") == {NAMES[0]: "warm", NAMES[3]: "cold", **there}
        tokens(child, "own", "acme")
        assert said("own") == {NAMES[2]: "hot"}, "no tenant learns of another's"
        assert said("own", tenant="acme") == {NAMES[2]: "hot", "own": "hot"}
        weights = folder / "in" / NAMES[2] / "adapter_model.safetensors"
        shutil.copy(folder / "in" / NAMES[5] / weights.name, weights)
        assert said()[NAMES[2]] == "cold", "what is in the slot are the weights of before"
    with served(engines, "told-next", VLLM, config(tiny, folder, slab)) as child:
        assert said(*NAMES[:2]) == dict.fromkeys(NAMES[:2], "warm"), "and was asked for none yet"


@pytest.mark.spec("E2", "E5", "F3")
def test_slots_of_another_rank_and_a_damaged_slab_are_as_an_empty_one(
    engines: ZygoteUnderTest,
    tiny: Path,
    folder: Path,
    slab: int,
    right: dict[str, list[int]],
) -> None:
    name = NAMES[0]
    with killed(engines, "wider", VLLM, config(tiny, folder, slab, rank=32)) as child:
        assert tokens(child, name) == right[name]
        wider = facts(child)["row_bytes"]
    with killed(engines, "narrower", VLLM, config(tiny, folder, slab)) as child:
        assert (facts(child)["ready"], facts(child)["row_bytes"] < wider) == (0, True)
        assert tokens(child, name) == right[name]
        assert tiers(child)["requests"] == {"hot": 0, "warm": 0, "cold": 1}
    with contextlib.closing(mmap.mmap(slab, os.fstat(slab).st_size)) as memory:
        memory[4096 : 4096 + 12 * 128] = b"\xa5" * (12 * 128)
    turns = config(tiny, folder, slab)
    turns["adapters"]["rebalance_s"] = 0.2
    with served(engines, "damaged", VLLM, turns) as child:
        assert tokens(child, name) == right[name]
        assert tiers(child)["requests"] == {"hot": 0, "warm": 0, "cold": 1}
        assert facts(child)["ready"] == 1
        takes_its_slot_back(child, name, right[name])


def takes_its_slot_back(child: Child, name: str, right: list[int]) -> None:
    """An adapter with ten uses in a minute, in the turn after others had to have all slots; with
    nine it does not."""
    seldom = NAMES[3]
    for _ in range(9):
        tokens(child, seldom)
    for _ in range(10):
        assert tokens(child, name) == right
    streams = [opened(child, other) for other in NAMES[1:3]]
    said = tiers(child)
    assert (said["top"][0]["adapter"], said["top"][0]["tier"]) == (f"tiny:{name}", "warm")
    hot = said["requests"]["hot"]
    for stream in streams:
        stream.close()
    until(lambda: tiers(child)["top"][0]["tier"] == "hot", 60)
    assert tiers(child)["requests"]["hot"] == hot, "without a request"
    [other] = [row for row in tiers(child)["top"] if row["adapter"] == f"tiny:{seldom}"]
    assert (other["tier"], other["uses"]) == ("warm", 9)
    assert tokens(child, name) == right
    assert tiers(child)["requests"]["hot"] == hot + 1


def opened(child: Child, name: str, tenant: str = "") -> Connection:
    """A stream that has begun and goes on."""
    conn = Connection(child.path)
    body = {"model": name, "prompt": PROMPT, "max_tokens": 900, "stream": True, "ignore_eos": True}
    headers = {"content-type": "application/json", TENANT_HEADER: tenant}
    conn.request("POST", "/v1/completions", json.dumps(body), headers)
    assert conn.getresponse().read(20).startswith(b"data: ")
    return conn
