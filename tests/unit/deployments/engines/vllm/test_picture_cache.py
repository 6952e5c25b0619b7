"""Projected pictures in a slab: who stays, for how long, what a promise holds, and the copies."""

import contextlib
import hashlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from arbiter.pool import Rows, Slab, SlabFile, SlabView, create, layout
from arbiter.units import MIB, Bytes, Content
from deployments.engines.vllm import picture_connector, picture_slab, pictures
from deployments.engines.vllm.picture_cache import (
    ENTRIES,
    ROW_EMBEDDINGS,
    TERM_S,
    Asked,
    Copies,
    PictureCache,
)
from deployments.engines.vllm.picture_connector import (
    Copier,
    Done,
    PictureConnector,
    PicturesInUse,
    row_bytes,
)
from tests.support.slabs import NAMESPACE, Clock

WIDTH, DTYPE = 24, torch.bfloat16
ROW = row_bytes(WIDTH, DTYPE)
EMBEDDINGS = 16  # of most pictures here: one row


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fd() -> Iterator[int]:
    made = create("test", Bytes(6 * MIB))
    set_limit(made, Bytes(6 * MIB))
    yield made
    os.close(made)


def set_limit(fd: int, limit: Bytes) -> None:
    with contextlib.closing(SlabView(fd)) as view:
        view.limit_bytes = limit


@contextlib.contextmanager
def opened(fd: int, clock: Clock, extent: int = ROW, entries: int = ENTRIES) -> Iterator["Engine"]:
    """As the next engine finds the slab. `extent`: bytes that it grows by."""
    slab = Slab(fd, Content.PICTURE, NAMESPACE, ROW, extent_bytes=Bytes(extent))
    file = SlabFile(fd)
    with contextlib.closing(slab):
        yield Engine(PictureCache(Rows(slab, TERM_S, clock), entries), Copier(file, WIDTH, DTYPE))


@pytest.fixture
def engine(fd: int, clock: Clock) -> Iterator["Engine"]:
    with opened(fd, clock) as made:
        yield made


def embeddings(name: str, count: int) -> torch.Tensor:
    """What the encoder makes of a picture."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)).to(DTYPE)


class Engine:
    """A scheduler and a worker that see pictures."""

    def __init__(self, cache: PictureCache, copier: Copier) -> None:
        self.cache, self.copier = cache, copier

    def schedule(self, *names: str, count: int = EMBEDDINGS) -> tuple[Copies, list[bool]]:
        """One step with these pictures, and which of them were promised."""
        self.cache.expect(Asked(name, count, layout.tenant_digest("acme")) for name in names)
        promised = []
        for name in names:
            promised.append(self.cache.promise(name))
            self.cache.begin(name)
        return self.cache.end_step(), promised

    def work(self, copies: Copies) -> dict[str, torch.Tensor]:
        """As a worker: what it loaded, after it has written what the encoder made."""
        loaded = {load.picture.identity: self.copier.load(load) for load in copies.loads}
        saved = [
            save.picture.identity
            for save in copies.saves
            if self.copier.save(save, embeddings(save.picture.identity, save.picture.count))
        ]
        self.cache.finish(copies, saved)
        return loaded

    def look(self, *names: str, count: int = EMBEDDINGS) -> list[bool]:
        """Runs one step. Returns which pictures needed no encoder, all of them equal to what it
        would have made."""
        copies, promised = self.schedule(*names, count=count)
        for name, loaded in self.work(copies).items():
            assert torch.equal(loaded, embeddings(name, count))
        return promised

    @property
    def counts(self) -> tuple[int, int]:
        facts = self.cache.facts()
        return facts["hits"], facts["misses"]


@pytest.mark.spec("H8")
def test_thirty_third_picture_drops_the_one_unused_for_longest(engine: Engine) -> None:
    names = [f"p{number}" for number in range(ENTRIES)]
    for name in names:
        assert engine.look(name) == [False]
    assert engine.look("p0") == [True]
    assert engine.look("new") == [False]
    assert engine.cache.facts()["entries"] == ENTRIES == 32
    assert engine.counts == (1, ENTRIES + 1)
    assert [engine.look(name) for name in ("p0", "p2", "new")] == [[True]] * 3
    assert engine.look("p1") == [False]


@pytest.mark.spec("H8")
def test_picture_leaves_when_unused_for_the_term(engine: Engine, clock: Clock) -> None:
    engine.look("old")
    clock.now_s += TERM_S - 1
    engine.look("new")
    assert engine.look("old") == [True]  # its term begins anew
    clock.now_s += TERM_S - 1
    engine.cache.expire()
    assert engine.cache.facts()["entries"] == 2
    clock.now_s += 1
    assert engine.look("old") == [False]
    clock.now_s += TERM_S
    engine.cache.expire()
    facts = engine.cache.facts()
    assert (facts["entries"], facts["ready"]) == (0, 0)
    assert engine.cache.rows.slab.allocated_bytes == 0
    assert engine.look("new") == [False]


@pytest.mark.spec("H8", "E1")
def test_next_engine_finds_what_a_killed_one_left_whole(fd: int, clock: Clock) -> None:
    with opened(fd, clock) as engine:
        engine.look("a")
        engine.look("b", count=3 * ROW_EMBEDDINGS + 1)
        engine.schedule("in flight")  # its rows are reserved, and never written
    with opened(fd, clock) as engine:
        assert engine.look("a") == [True]
        assert engine.look("b", count=3 * ROW_EMBEDDINGS + 1) == [True]
        assert engine.look("in flight") == [False]
        assert (engine.counts, engine.cache.encoder_runs) == ((2, 4), 1)


@pytest.mark.spec("H8")
def test_other_count_of_embeddings_is_another_picture(engine: Engine) -> None:
    engine.look("a")
    assert engine.look("a", count=EMBEDDINGS + 1) == [False]


@pytest.mark.spec("H8", "E3")
def test_promise_is_held_until_the_worker_has_loaded(fd: int, clock: Clock) -> None:
    """However long that takes, and whatever asks for room, memory or time meanwhile."""
    with opened(fd, clock, entries=2) as engine:
        engine.look("a")
        copies, promised = engine.schedule("a")
        assert promised == [True]
        for name in ("b", "c", "d"):
            engine.look(name)
        clock.now_s += 2 * TERM_S
        engine.cache.expire()
        engine.cache.purge()
        set_limit(fd, Bytes(0))
        engine.cache.shrink()
        assert torch.equal(engine.work(copies)["a"], embeddings("a", EMBEDDINGS))
        engine.cache.shrink()
        assert engine.cache.facts()["ready"] == 0


@pytest.mark.spec("H8")
def test_promise_that_no_request_took_ends_with_its_step(engine: Engine) -> None:
    engine.look("a")
    engine.cache.expect([Asked("a", EMBEDDINGS)])
    assert engine.cache.promise("a") and engine.cache.promise("a")
    assert engine.cache.end_step() == Copies()
    engine.cache.purge()
    assert engine.look("a") == [False]
    assert engine.counts == (0, 2), "it was not read"


@pytest.mark.spec("H8", "E5")
def test_picture_is_there_once_it_is_written_and_not_before(engine: Engine) -> None:
    first, _ = engine.schedule("a")
    second, promised = engine.schedule("a")  # a step that begins before the first one ends
    assert (promised, second.saves) == ([False], [])
    engine.work(first)
    engine.work(second)
    assert engine.look("a") == [True]


@pytest.mark.spec("H8")
def test_embeddings_of_another_shape_or_type_are_not_kept(engine: Engine) -> None:
    for wrong in (torch.zeros(EMBEDDINGS, WIDTH + 1, dtype=DTYPE), torch.zeros(EMBEDDINGS, WIDTH)):
        copies, _ = engine.schedule("a")
        [save] = copies.saves
        assert not engine.copier.save(save, wrong)
        engine.cache.finish(copies, [])
        assert engine.cache.facts()["ready"] == 0
    assert engine.look("a") == [False]


@pytest.mark.spec("H8", "E6")
def test_what_finds_no_room_is_encoded_each_time_and_harms_no_other(fd: int, clock: Clock) -> None:
    set_limit(fd, Bytes(layout.geometry(Bytes(6 * MIB), ROW).table_end + 2 * ROW))
    with opened(fd, clock) as engine:
        engine.look("a")
        for _ in range(2):
            assert engine.look("large", count=2 * ROW_EMBEDDINGS + 1) == [False]
        assert engine.cache.facts()["entries"] <= 1
        assert engine.look("b") == [False]
        assert engine.look("b") == [True]


@pytest.mark.spec("H8")
def test_picture_that_lost_a_row_is_encoded_and_whole_again(engine: Engine) -> None:
    count = 3 * ROW_EMBEDDINGS
    engine.look("a", count=count)
    engine.cache.rows.evict([Asked("a", count).keys[1]])
    assert engine.cache.facts()["entries"] == 0
    assert engine.look("a", count=count) == [False]
    assert engine.look("a", count=count) == [True]


def spoil_header(memory: mmap.mmap) -> None:
    memory[0:64] = bytes(range(64))


def spoil_marks(memory: mmap.mmap) -> None:
    memory[4096 : 4096 + 2 * 128] = b"\xa5" * (2 * 128)


@pytest.mark.spec("H8", "E5")
@pytest.mark.parametrize("damage", [spoil_header, spoil_marks])
def test_damaged_slab_is_as_if_the_pictures_were_unknown(
    fd: int, clock: Clock, damage: Any
) -> None:
    with opened(fd, clock) as engine:
        engine.look("a", "b")
    with contextlib.closing(mmap.mmap(fd, os.fstat(fd).st_size)) as memory:
        damage(memory)
    with opened(fd, clock) as engine:
        assert engine.look("a", "b") == [False, False]
        assert engine.look("a", "b") == [True, True]


@pytest.mark.spec("H8", "E6")
def test_rows_name_their_tenant(fd: int, engine: Engine) -> None:
    engine.look("a")
    with contextlib.closing(SlabView(fd)) as view:
        assert view.content is Content.PICTURE
        assert [mark.tenant for _, mark in view.marks()] == [layout.tenant_digest("acme")]


# -- vLLM's own parts ------------------------------------------------------------------------------


def request(name: str, *pictures: str, modality: str = "image") -> Any:
    place = SimpleNamespace(get_num_embeds=lambda: EMBEDDINGS)
    features = [
        SimpleNamespace(identifier=one, modality=modality, mm_position=place) for one in pictures
    ]
    return SimpleNamespace(
        request_id=name,
        mm_features=features,
        cache_salt=None,
        get_num_encoder_embeds=lambda number: EMBEDDINGS,
    )


@pytest.mark.spec("H8")
def test_device_has_a_picture_only_while_a_request_reads_it() -> None:
    manager, hits = PicturesInUse(1000), []
    manager.on_hit = lambda: hits.append(1)
    one, other = request("one", "a"), request("other", "a", "a")
    assert not manager.check_and_update_cache(one, 0)
    manager.allocate(one, 0)
    for number in (0, 1, 0, 1):  # in each step again
        assert manager.check_and_update_cache(other, number)
    assert len(hits) == 2
    manager.free(one)
    assert manager.get_freed_mm_hashes() == []
    manager.free(other)
    assert manager.get_freed_mm_hashes() == ["a"]
    assert not manager.cached and not manager.num_embeds_by_hash
    assert manager.num_free_slots == manager.num_freeable_slots == 1000


def connector(cache: PictureCache) -> PictureConnector:
    made: PictureConnector = object.__new__(PictureConnector)
    made.cache, made._width = cache, WIDTH
    return made


@pytest.mark.spec("H8")
def test_media_whose_identity_is_not_ours_are_neither_kept_nor_counted(engine: Engine) -> None:
    made, asked = connector(engine.cache), request("r", "a", modality="video")
    assert made.ensure_cache_available(asked, 0)
    assert not made.has_cache_item("a")
    made.update_state_after_alloc(asked, 0)
    step = made.build_connector_meta(None)  # type: ignore[arg-type]
    assert (step.copies, step.width, engine.counts) == (Copies(), WIDTH, (0, 0))


@pytest.mark.spec("H8")
def test_step_is_done_once_all_workers_are_and_the_first_one_wrote(engine: Engine) -> None:
    made, asked = connector(engine.cache), request("r", "a")
    made.ensure_cache_available(asked, 0)
    made.update_state_after_alloc(asked, 0)
    copies = made.build_connector_meta(None).copies  # type: ignore[arg-type]
    assert engine.copier.save(copies.saves[0], embeddings("a", EMBEDDINGS))
    done = Done(copies).aggregate(Done(copies, {"a"})).aggregate(Done(copies))
    made.update_connector_output(SimpleNamespace(ec_connector_worker_meta=done))  # type: ignore[arg-type]
    assert engine.look("a") == [True]


def configured(**changes: Any) -> Any:
    facts: dict[str, Any] = {
        "dtype": "bfloat16",
        "quantization": None,
        "model": "/nowhere",
        "hf_config": {"layers": 4},
        "is_encoder_decoder": False,
        "mm_processor_kwargs": None,
        "media_io_kwargs": {},
        "pictures": 1,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "enable_tower_connector_lora": False,
    } | changes
    sees = SimpleNamespace(**facts, get_limit_per_prompt=lambda modality: facts["pictures"])
    shape = SimpleNamespace(to_dict=lambda: facts["hf_config"])
    every = SimpleNamespace(**facts | {"hf_config": shape}, multimodal_config=sees)
    return SimpleNamespace(model_config=every, parallel_config=every, lora_config=every)


@pytest.mark.spec("H8", "E2")
@pytest.mark.parametrize(
    "fact",
    [
        "dtype",
        "quantization",
        "hf_config",
        "mm_processor_kwargs",
        "media_io_kwargs",
        "tensor_parallel_size",
        "weights",
        "processor",
        "vllm",
        "device",
    ],
)
def test_namespace_changes_with_each_fact_of_an_engine(
    fact: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def namespace(weights: str = "w", **changes: Any) -> str:
        return picture_slab._namespace(configured(model=str(tmp_path), **changes), weights)

    before = namespace()
    assert namespace() == before
    match fact:
        case "weights":
            assert namespace("others") != before
            return
        case "processor":
            (tmp_path / "preprocessor_config.json").write_text("{}")
        case "vllm":
            monkeypatch.setattr(picture_slab.vllm, "__version__", "0")
        case "device":
            other = SimpleNamespace(device_type="other")
            monkeypatch.setattr(picture_slab, "current_platform", other)
        case _:
            assert namespace(**{fact: "other"}) != before
            return
    assert namespace() != before


@pytest.mark.spec("H8")
@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"pictures": 0}, "takes no pictures"),
        ({"is_encoder_decoder": True}, "encoder of text"),
        ({"enable_tower_connector_lora": True}, "adapters"),
        ({"pipeline_parallel_size": 2}, "stages"),
        ({"data_parallel_size": 2}, "one writer"),
    ],
)
def test_models_that_cannot_keep_pictures_say_why(change: dict[str, Any], cause: str) -> None:
    assert picture_slab.refusal(configured()) is None
    assert cause in (picture_slab.refusal(configured(**change)) or "")


@pytest.mark.spec("H8")
@pytest.mark.parametrize("change", ["begin", "middle", "end", "size", "name", "small"])
def test_content_of_a_model_changes_with_its_files_and_not_with_their_times(
    tmp_path: Path, change: str
) -> None:
    large, small = tmp_path / "model.safetensors", tmp_path / "config.json"
    large.write_bytes(bytes(5 << 20))
    small.write_text("{}")
    before = pictures.content_hash(tmp_path)
    os.utime(large, (1, 1))
    assert pictures.content_hash(tmp_path) == before
    places = {"begin": 0, "middle": 32 * ((5 << 20) - (64 << 10)) // 63, "end": (5 << 20) - 1}
    if change in places or change == "size":
        with large.open("r+b") as stream:
            stream.seek(places.get(change, 5 << 20))
            stream.write(b"x")
    elif change == "name":
        large.rename(tmp_path / "other.safetensors")
    else:
        small.write_text('{"a": 1}')
    assert pictures.content_hash(tmp_path) != before


def test_row_is_whole_pages() -> None:
    assert row_bytes(24, torch.float32) == 8192 and row_bytes(4096, torch.bfloat16) == 512 * 1024
    assert picture_connector.IMAGE == "image"
