"""Between vLLM's connector and a slab: what is stored, in which order it leaves, and the copies."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
    ScheduleEndContext,
)

from arbiter.pool import Removal, SlabFile, SlabView, Term, layout
from deployments.engines.vllm.kv import kv_offload
from deployments.engines.vllm.kv.kept_blocks import KeptSince
from deployments.engines.vllm.kv.kv_offload import RowCopier, SlabManager
from deployments.engines.vllm.slabs import lent_slab
from deployments.engines.vllm.slabs.lent_slab import mapped_rows
from tests.support.slabs import EXTENT, ROW, TERM_S, Clock, keys, rows_of, set_limit, slab_file

FULL = 4 * EXTENT // ROW
NO_STEP = ScheduleEndContext([], [])
PAGE = 1000  # bytes of one layer of a block; an odd number, and less than a row
BLOCKS = 8


@pytest.fixture
def fd() -> Iterator[int]:
    with slab_file() as made:
        yield made


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def manager(fd: int, clock: Clock) -> Iterator[SlabManager]:
    with rows_of(fd, clock) as rows:
        yield SlabManager(rows, steps_after_reset=3)


def request(*prefix: bytes, term: str = "") -> ReqContext:
    """A request whose blocks these are, as the connector notes them."""
    context = ReqContext("r", kv_transfer_params={"term": term} if term else None)
    for place, key in enumerate(prefix, start=1):
        context.set_offload_key_position(key, place * 128)
    return context


def store(manager: SlabManager, prefix: list[bytes], term: str = "") -> list[bytes]:
    asked = request(*prefix, term=term)
    manager.on_new_request(asked)
    reserved = manager.prepare_store(prefix, asked)
    manager.complete_store(set(reserved.keys_to_store), asked)
    manager.on_request_finished(asked)
    return reserved.evicted_keys


def hits(manager: SlabManager, among: list[bytes]) -> list[bytes]:
    asked = request()
    return [key for key in among if manager.lookup(key, asked) is LookupResult.HIT]


def test_block_is_found_once_it_is_written_and_not_before(manager: SlabManager) -> None:
    asked = request(b"a")
    assert manager.lookup(b"a", asked) is LookupResult.MISS
    manager.prepare_store([b"a"], asked)
    assert manager.lookup(b"a", asked) is LookupResult.HIT_PENDING
    manager.complete_store({b"a"}, asked)
    assert manager.lookup(b"a", asked) is LookupResult.HIT


def came(tenant: str = "", at_s: float = 0.0) -> Any:
    """A request, as vLLM has it."""
    return SimpleNamespace(cache_salt=tenant or None, arrival_time=at_s)


@pytest.mark.spec("E6")
def test_request_that_came_before_its_tenant_was_removed_leaves_no_row(
    fd: int, manager: SlabManager
) -> None:
    acme, (before, after) = (
        layout.tenant_digest("acme"),
        (ReqContext("before"), ReqContext("after")),
    )
    manager.requests = {"before": came("acme", 10.0), "after": came("acme", 12.0)}
    with contextlib.closing(SlabView(fd)) as owner:
        manager.on_new_request(before)
        manager.prepare_store([b"old"], before)
        manager.complete_store({b"old"}, before)
        owner.order_erasure(Removal(acme, 11.0))
        manager.shrink()
        assert not owner.must_erase and not list(owner.marks())
        manager.on_new_request(after)
        for asked, key in ((before, b"older"), (after, b"new")):
            manager.complete_store(set(manager.prepare_store([key], asked).keys_to_store), asked)
        assert [mark.key for _, mark in owner.marks()] == [b"new"]


@pytest.mark.spec("G3")
def test_router_is_told_that_a_slab_without_rows_keeps_nothing_of_what_the_device_evicts(
    fd: int, manager: SlabManager, clock: Clock
) -> None:
    kept = KeptSince()
    manager.tell_kept(kept)
    kept.lost_on_device(7.0)
    assert kept.facts().since_s == 7.0
    store(manager, keys(3))
    manager.on_schedule_end(NO_STEP)
    assert kept.facts().since_s == 0.0
    set_limit(fd, 0)
    manager.on_schedule_end(NO_STEP)
    store(manager, [b"more"])
    kept.lost_on_device(clock() + 100)
    assert kept.facts().since_s == clock() + 100, "what came after the rows left was never stored"


@pytest.mark.spec("G3")
def test_router_is_told_what_tenants_lost_for_their_caps(manager: SlabManager) -> None:
    kept, acme = KeptSince(), layout.tenant_digest("acme")
    manager.tell_kept(kept)
    manager.rows.set_caps({acme: 2 / FULL})
    manager.requests = {"r": came("acme")}
    store(manager, keys(2))
    manager.on_schedule_end(NO_STEP)
    assert kept.facts().capped_since_s == {}
    store(manager, [b"more"])
    manager.on_schedule_end(NO_STEP)
    assert kept.facts().capped_since_s == {acme.hex(): manager.rows.capped_used_s[acme]}


@pytest.mark.spec("E6")
def test_row_says_whose_request_stored_it_also_when_that_is_gone(manager: SlabManager) -> None:
    requests = {name: came(name) for name in ("acme", "")}
    manager.requests = requests
    for name in ("acme", ""):
        asked = ReqContext(name)
        manager.on_new_request(asked)
        key = f"of {name}".encode()
        manager.prepare_store([key], asked)
        del requests[name]
        manager.complete_store({key}, asked)
    said = {mark.key: mark.tenant for _, mark in manager.rows.slab.marks()}
    assert said == {b"of acme": layout.tenant_digest("acme"), b"of ": bytes(16)}
    assert len(layout.tenant_digest("acme")) == 16


@pytest.mark.spec("E6")
def test_rows_of_the_default_tenant_have_its_digest_also_before_they_are_in_a_file(
    manager: SlabManager,
) -> None:
    asked = ReqContext("r")
    manager.requests = {"r": came()}
    manager.on_new_request(asked)
    manager.prepare_store([b"key"], asked)
    manager.complete_store({b"key"}, asked)
    with contextlib.closing(SlabView(manager.rows.slab.file.fd)) as owner:
        assert owner.order_erasure(Removal(layout.NO_TENANT))
        manager.shrink()
        assert not owner.must_erase and len(manager.rows) == 0


@pytest.mark.spec("F9")
def test_engine_whose_blocks_lack_layers_stores_none_and_still_loads(manager: SlabManager) -> None:
    asked = ReqContext("r")
    manager.prepare_store([b"before"], asked)
    manager.complete_store({b"before"}, asked)
    manager.may_store = False
    reserved = manager.prepare_store([b"after"], asked)
    assert reserved is not None and list(reserved.keys_to_store) == []
    assert manager.lookup(b"before", asked) is LookupResult.HIT


@pytest.mark.spec("G2", "G4")
def test_blocks_of_a_request_expire_together_by_the_longest_term_of_their_uses(
    clock: Clock, manager: SlabManager
) -> None:
    def ends_in_s() -> dict[bytes, float]:
        return {mark.key: mark.expires_s - clock() for _, mark in manager.rows.slab.marks()}

    def terms() -> dict[bytes, int]:
        return {mark.key: mark.kind for _, mark in manager.rows.slab.marks()}

    store(manager, [b"a", b"b"], term="short")
    assert ends_in_s() == {b"a": 300.0, b"b": 300.0}
    store(manager, [b"a", b"b", b"c"], term="extended")
    assert set(ends_in_s().values()) == {86_400.0}
    clock.now_s += 60
    store(manager, [b"a", b"d"])
    assert ends_in_s() == {b"a": 86_340.0, b"b": 86_340.0, b"c": 86_340.0, b"d": TERM_S}
    assert terms() == dict.fromkeys((b"a", b"b", b"c"), Term.EXTENDED) | {b"d": Term.LONG}
    clock.now_s += 86_340 - TERM_S / 2
    manager.on_request_finished(request(b"b"))
    assert (ends_in_s()[b"b"], terms()[b"b"]) == (TERM_S, Term.LONG)


@pytest.mark.spec("G4")
def test_blocks_that_are_loaded_stay_for_the_term_of_the_request_that_loads_them(
    clock: Clock, manager: SlabManager
) -> None:
    store(manager, [b"a"], term="short")
    clock.now_s += 299
    asked = request(b"a", term="short")
    manager.on_new_request(asked)
    manager.prepare_load([b"a"], asked)
    clock.now_s += 299
    assert manager.lookup(b"a", asked) is LookupResult.HIT


@pytest.mark.spec("L3")
@pytest.mark.parametrize("said", [{}, {"term": "for ever"}, {"term": 7}, {"other": "x"}])
def test_term_that_is_none_is_the_default(
    clock: Clock, manager: SlabManager, said: dict[str, Any]
) -> None:
    asked = ReqContext("r", kv_transfer_params=said)
    manager.on_new_request(asked)
    manager.prepare_store([b"a"], asked)
    manager.complete_store({b"a"}, asked)
    [(_, mark)] = manager.rows.slab.marks()
    assert (mark.kind, mark.expires_s) == (Term.LONG, clock() + TERM_S)


def test_block_whose_copy_failed_is_not_there(manager: SlabManager) -> None:
    asked = request(b"a")
    manager.prepare_store([b"a"], asked)
    manager.complete_store({b"a"}, asked, success=False)
    assert manager.lookup(b"a", asked) is LookupResult.MISS


def test_full_slab_stores_what_fits_and_never_answers_none(fd: int, manager: SlabManager) -> None:
    reading = keys(FULL)
    store(manager, reading)
    manager.prepare_load(reading, request(*reading))
    reserved = manager.prepare_store([b"new"], request(b"new"))
    assert (reserved.keys_to_store, list(reserved.store_spec.block_ids)) == ([], [])
    manager.complete_load(set(reading), request(*reading))
    assert manager.prepare_store([b"new"], request(b"new")).keys_to_store == [b"new"]


@pytest.mark.spec("E4")
def test_tail_of_a_conversation_leaves_before_its_head_in_whatever_order_it_was_stored(
    manager: SlabManager,
) -> None:
    first, second = keys(FULL // 2, "a"), keys(FULL // 2, "b")
    store(manager, first)
    store(manager, second)
    assert store(manager, keys(3, "c")) == first[:-4:-1]
    assert hits(manager, first) == first[:-3]


@pytest.mark.spec("G7")
def test_long_request_notes_its_blocks_as_used_now_and_then_and_not_with_each_new_one(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With each of a thousand new ones it would be half a million."""
    with slab_file(extents=304, rows=1_216) as fd, rows_of(fd, clock) as rows:
        manager, noted, note = SlabManager(rows), 0, rows.touch

        def counted(used: list[bytes], term: Term) -> None:
            nonlocal noted
            noted += len(used)
            note(used, term)

        monkeypatch.setattr(rows, "touch", counted)
        prefix = keys(1_000)
        asked = ReqContext("r")
        manager.on_new_request(asked)
        for place, key in enumerate(prefix, start=1):
            asked.set_offload_key_position(key, place * 16)
            manager.prepare_store([key], asked)
            manager.complete_store({key}, asked)
        assert len(prefix) < noted < 12 * len(prefix)
        manager.on_request_finished(asked)
        monkeypatch.undo()
        assert list(rows._ready) == prefix[::-1], "the head of a prefix leaves last"


def test_request_that_runs_for_long_notes_its_blocks_again(
    clock: Clock, manager: SlabManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(kv_offload, "time", SimpleNamespace(monotonic=lambda: now.s))
    first, asked = keys(FULL - 2), request(*keys(FULL - 2))
    manager.on_new_request(asked)
    manager.prepare_store(first, asked)
    manager.complete_store(set(first), asked)
    for other, after_s, is_noted in ((b"x", 1.0, False), (b"y", 31.0, True)):
        now.s += after_s
        with_other = request(other)
        manager.prepare_store([other], with_other)
        manager.complete_store({other}, with_other)
        manager.complete_store(set(), asked)
        assert (next(reversed(manager.rows._ready)) == first[0]) is is_noted


def test_blocks_that_the_device_had_count_as_used(manager: SlabManager) -> None:
    """The connector asks for none of them, and stores none."""
    first, second = keys(FULL // 2, "a"), keys(FULL // 2, "b")
    store(manager, first)
    store(manager, second)
    manager.on_request_finished(request(*first))
    assert store(manager, [b"c"]) == second[-1:]


def test_reset_keeps_what_is_whole_and_the_place_of_what_was_written_until_the_worker_is_done(
    fd: int, manager: SlabManager
) -> None:
    store(manager, keys(FULL - 2))
    asked = request(b"half")
    manager.prepare_store([b"half"], asked)
    manager.prepare_load(keys(2), asked)
    manager.reset_cache()
    assert manager.lookup(b"half", asked) is LookupResult.MISS
    assert hits(manager, keys(FULL - 2)) == keys(FULL - 2)
    set_limit(fd, 1)
    for _ in range(2):
        manager.on_schedule_end(NO_STEP)
        assert manager.rows.slab.usable_count == FULL
    manager.on_schedule_end(NO_STEP)
    assert manager.rows.slab.usable_count == EXTENT // ROW


@pytest.mark.spec("E4", "E6")
def test_engine_that_takes_no_step_after_a_reset_erases_and_shrinks(
    fd: int, manager: SlabManager
) -> None:
    manager.requests = {"r": came("acme")}
    store(manager, keys(FULL // 2, "a"))
    manager.requests = {}
    store(manager, keys(FULL // 2, "b"))
    manager.reset_cache()
    with contextlib.closing(SlabView(fd)) as owner:
        assert owner.order_erasure(Removal(layout.tenant_digest("acme")))
        manager.shrink()
        assert not owner.must_erase
    assert hits(manager, [*keys(FULL // 2, "a"), *keys(FULL // 2, "b")]) == keys(FULL // 2, "b")
    set_limit(fd, 1)
    manager.shrink()
    assert manager.facts()["ready"] == EXTENT // ROW == manager.rows.slab.usable_count


def test_row_that_was_being_written_at_a_reset_is_no_others_until_the_worker_is_done(
    manager: SlabManager,
) -> None:
    store(manager, keys(FULL - 1))
    [void] = manager.prepare_store([b"half"], request(b"half")).store_spec.block_ids
    manager.reset_cache()
    [other] = manager.prepare_store([b"new"], request(b"new")).store_spec.block_ids
    assert other != void
    for _ in range(3):
        manager.on_schedule_end(NO_STEP)
    assert list(manager.prepare_store([b"newer"], request(b"newer")).store_spec.block_ids) == [void]


@pytest.mark.spec("E1")
def test_step_after_the_limit_fell_gives_the_rest_back(fd: int, manager: SlabManager) -> None:
    store(manager, keys(FULL))
    set_limit(fd, 2)
    manager.on_schedule_end(NO_STEP)
    assert os.fstat(fd).st_blocks * 512 == manager.rows.slab.geometry.table_end + 2 * EXTENT
    assert manager.facts()["ready"] == FULL // 2


def caches(seed: int) -> CanonicalKVCaches:
    """Two layers of one group, and a third layer of another group in the first one's memory."""
    made = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randint(-128, 127, (BLOCKS, PAGE), dtype=torch.int8, generator=made) for _ in range(2)
    ]
    groups = [[CanonicalKVCacheRef(0, PAGE), CanonicalKVCacheRef(1, PAGE - 8)]]
    groups.append([CanonicalKVCacheRef(0, PAGE)])
    return CanonicalKVCaches([CanonicalKVCacheTensor(t, PAGE) for t in tensors], groups)


def copier(fd: int, cache: CanonicalKVCaches) -> RowCopier:
    return RowCopier(cache, mapped_rows(SlabFile(fd), ROW)[:, : 2 * PAGE])


@pytest.mark.spec("E10")
def test_blocks_of_one_engine_are_the_next_ones_also_after_its_storage_was_given_back(
    fd: int, manager: SlabManager
) -> None:
    asked = request(*keys(3))
    stored = manager.prepare_store(keys(3), asked).store_spec
    old, new = caches(1), caches(2)
    first = copier(fd, old)
    assert first.submit_store(7, GPULoadStoreSpec([5, 2, 6], [2, 1], [0, 0]), stored)
    (done,) = first.get_finished()
    assert (done.job_id, done.success, done.transfer_size) == (7, True, 5 * PAGE - 16)
    manager.complete_store(set(keys(3)), asked)

    second = copier(fd, new)
    for cache in new.tensors:
        storage, size = cache.tensor.untyped_storage(), cache.tensor.nbytes
        storage.resize_(0)
        storage.resize_(size)
        cache.tensor.zero_()
    second.submit_load(
        8, manager.prepare_load(keys(3), asked), GPULoadStoreSpec([1, 3, 4], [2, 1], [0, 0])
    )
    second.wait({8})
    assert [done.job_id for done in second.get_finished()] == [8]
    one, two = ([cache.tensor for cache in each.tensors] for each in (old, new))
    for source, target in ((5, 1), (2, 3)):
        assert torch.equal(one[0][source], two[0][target])
        assert torch.equal(one[1][source, : PAGE - 8], two[1][target, : PAGE - 8])
    assert torch.equal(one[0][6], two[0][4])
    assert not two[1][4].any() and not two[0][0].any(), "only what was asked is written"


def test_engine_without_a_slab_gets_no_argument() -> None:
    assert kv_offload.arguments({"model": "m"}) == {}


def test_arguments_name_the_slab_and_store_answers_too() -> None:
    given = kv_offload.arguments(
        {"model": "m", "slabs": {"kv": {"path": "/proc/1/fd/3", "term_s": 9}}}
    )
    assert given["prefix_caching_hash_algo"] == "sha256"
    extra = given["kv_transfer_config"]["kv_connector_extra_config"]
    assert (extra["slab"], extra["term_s"]) == ("/proc/1/fd/3", 9.0)
    assert extra["file"] is None
    assert extra["offload_prompt_only"] is False


@pytest.mark.spec("E1")
def test_slab_that_was_taken_is_found_though_its_owner_has_ended() -> None:
    with slab_file() as fd:
        owners = os.dup(fd)
        extra: dict[str, Any] = {"slab": f"/proc/{os.getpid()}/fd/{owners}"}
        assert lent_slab.hold_configured(extra) is None
        os.close(owners)
        assert os.stat(extra["slab"]).st_ino == os.fstat(fd).st_ino
        os.close(int(extra["slab"].rsplit("/", 1)[1]))


def test_what_is_no_slab_is_not_taken(tmp_path: Path) -> None:
    extra = {"slab": str(tmp_path)}
    assert str(tmp_path) in (lent_slab.hold_configured(extra) or "") and extra["slab"] == str(
        tmp_path
    )


def configured(**changes: Any) -> Any:
    facts = {
        "runner_type": "generate",
        "is_encoder_decoder": False,
        "is_hybrid": False,
        "is_attention_free": False,
        "enable_prefix_caching": True,
        "data_parallel_size": 1,
        "pipeline_parallel_size": 2,
        "get_total_num_hidden_layers": lambda: 22,
        "speculative_config": None,
    }
    all_of_it = SimpleNamespace(**{**facts, **changes})
    return SimpleNamespace(
        model_config=all_of_it,
        parallel_config=all_of_it,
        cache_config=all_of_it,
        speculative_config=all_of_it.speculative_config,
    )


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"runner_type": "pooling"}, "generate"),
        ({"is_encoder_decoder": True}, "encoder"),
        ({"is_hybrid": True}, "state"),
        ({"is_attention_free": True}, "state"),
        ({"enable_prefix_caching": False}, "prefix cache"),
        ({"data_parallel_size": 2}, "data-parallel"),
        ({"pipeline_parallel_size": 4}, "stages"),
        ({"speculative_config": object()}, "stages"),
    ],
)
def test_models_that_cannot_keep_blocks_say_why(change: dict[str, Any], cause: str) -> None:
    assert kv_offload.refusal(configured()) is None
    assert cause in (kv_offload.refusal(configured(**change)) or "")


@pytest.mark.spec("E2")
@pytest.mark.parametrize("change", ["content", "time", "name", "added"])
def test_digest_of_weights_changes_with_them(tmp_path: Path, change: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(3 << 20))
    (tmp_path / "notes.txt").write_text("no weights")
    before = lent_slab.weights_digest(tmp_path)
    status = file.stat()
    match change:
        case "content":
            with file.open("r+b") as stream:
                stream.seek(-1, os.SEEK_END)
                stream.write(b"x")
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        case "time":
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        case "name":
            file.rename(tmp_path / "other.safetensors")
        case "added":
            (tmp_path / "more.safetensors").write_bytes(b"x")
    assert before and lent_slab.weights_digest(tmp_path) not in (None, before)


FACTS: dict[str, Any] = {
    "prefix_caching_hash_algo": "sha256",
    "dtype": "bfloat16",
    "quantization": None,
    "hf_config": {"layers": 4},
    "cache_dtype": "auto",
    "max_model_len": 2048,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "decode_context_parallel_size": 1,
}


def namespace_facts(drafts: object = None, **changes: Any) -> str:
    facts = FACTS | changes
    shape = SimpleNamespace(to_dict=lambda: facts["hf_config"])
    every = SimpleNamespace(**facts | {"hf_config": shape})
    told = SimpleNamespace(
        model_config=every, cache_config=every, parallel_config=every, speculative_config=drafts
    )
    return kv_offload._digest(kv_offload._facts(told)).hex()  # type: ignore[arg-type]


@pytest.mark.spec("E2")
@pytest.mark.parametrize("fact", [*FACTS, "drafts", "vllm", "torch", "device"])
def test_namespace_changes_with_each_fact_of_an_engine(
    fact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = namespace_facts()
    assert namespace_facts() == before
    match fact:
        case "vllm":
            monkeypatch.setattr(kv_offload.vllm, "__version__", "0")
        case "torch":
            monkeypatch.setattr(kv_offload, "version", lambda package: "0")
        case "device":
            other = SimpleNamespace(device_type="other")
            monkeypatch.setattr(kv_offload, "current_platform", other)
        case "drafts":
            drafter = SimpleNamespace(method="draft_model", num_speculative_tokens=3)
            assert namespace_facts(drafter) != before
            return
        case _:
            assert namespace_facts(**{fact: "other"}) != before
            return
    assert namespace_facts() != before


def test_folder_without_weights_has_no_digest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert lent_slab.weights_digest(tmp_path) is None
    assert lent_slab.weights_digest(tmp_path / "org" / "name") is None
