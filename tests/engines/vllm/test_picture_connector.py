"""What vLLM's scheduler and workers see of pictures in a slab."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deployments.engines.vllm.pictures.picture_cache import Copies, PictureCache
from deployments.engines.vllm.pictures.picture_connector import (
    IMAGE,
    PictureConnector,
    PicturesInUse,
    StepDone,
    row_bytes,
)
from tests.support.picture_slabs import (
    EMBEDDINGS,
    SeeingEngine,
    embeddings,
    opened,
    picture_slab_file,
)
from tests.support.slabs import Clock


@pytest.fixture
def engine() -> Iterator[SeeingEngine]:
    with picture_slab_file() as fd, opened(fd, Clock()) as made:
        yield made


def request(name: str, *pictures: str, modality: str = "image") -> Any:
    place = SimpleNamespace(offset=5, length=20, get_num_embeds=lambda: EMBEDDINGS)
    features = [
        SimpleNamespace(identifier=one, modality=modality, mm_position=place) for one in pictures
    ]
    return SimpleNamespace(
        request_id=name,
        mm_features=features,
        cache_salt=None,
        arrival_time=0.0,
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
    made.cache = cache
    return made


def step_of(made: PictureConnector, freed: list[str] | None = None) -> Copies:
    """What the workers have to copy in a step; `freed`: pictures that nothing reads any more."""
    output: Any = SimpleNamespace(free_encoder_mm_hashes=freed or [])
    return made.build_connector_meta(output).copies


@pytest.mark.spec("H8")
def test_media_whose_identity_is_not_ours_are_neither_kept_nor_counted(
    engine: SeeingEngine,
) -> None:
    made, asked = connector(engine.cache), request("r", "a", modality="video")
    assert made.ensure_cache_available(asked, 0)
    assert not made.has_cache_item("a")
    made.update_state_after_alloc(asked, 0)
    assert (step_of(made), engine.counts) == (Copies(), (0, 0))


@pytest.mark.spec("H8")
def test_picture_that_is_computed_is_not_looked_for_again(engine: SeeingEngine) -> None:
    engine.look("a")
    made, asked = connector(engine.cache), request("r", "a")
    for computed, is_there in ((24, True), (25, False)):
        made.ensure_cache_available(asked, computed)
        assert made.has_cache_item("a") is is_there
        step_of(made)


@pytest.mark.spec("H8")
def test_step_is_done_once_all_workers_are_and_the_first_one_wrote(engine: SeeingEngine) -> None:
    made, asked = connector(engine.cache), request("r", "a")
    made.ensure_cache_available(asked, 0)
    made.update_state_after_alloc(asked, 0)
    copies = step_of(made)
    assert engine.copier.save(copies.saves[0], embeddings("a", EMBEDDINGS))
    done = StepDone(copies).aggregate(StepDone(copies, {"a"})).aggregate(StepDone(copies))
    made.update_connector_output(SimpleNamespace(ec_connector_worker_meta=done))  # type: ignore[arg-type]
    assert engine.look("a") == [True]


def takes(made: PictureConnector, manager: PicturesInUse, asked: Any) -> None:
    """As vLLM's scheduler gives a request its picture."""
    made.ensure_cache_available(asked, 0)
    if not manager.check_and_update_cache(asked, 0):
        made.has_cache_item("a")
        manager.allocate(asked, 0)
        made.update_state_after_alloc(asked, 0)


@pytest.mark.spec("H8")
@pytest.mark.parametrize("is_known", [True, False])
def test_picture_of_a_request_that_is_preempted_in_its_step_is_neither_loaded_nor_pinned(
    engine: SeeingEngine, is_known: bool
) -> None:
    """The device would keep it, and the books would not have it."""
    if is_known:
        engine.look("a")
    made, manager, asked = connector(engine.cache), PicturesInUse(1000), request("r", "a")
    takes(made, manager, asked)
    manager.free(asked)  # a more urgent request takes its blocks
    assert step_of(made, manager.get_freed_mm_hashes()) == Copies()
    assert engine.look("a") == [is_known], "its rows can be had again"
    engine.cache.purge()
    assert engine.cache.facts()["ready"] == 0, "nothing holds them"


@pytest.mark.spec("H8")
@pytest.mark.parametrize("is_before", [True, False])
def test_picture_that_another_request_of_the_step_reads_is_loaded_all_the_same(
    engine: SeeingEngine, is_before: bool
) -> None:
    engine.look("a")
    made, manager = connector(engine.cache), PicturesInUse(1000)
    one, other = request("one", "a"), request("other", "a")
    takes(made, manager, one)
    if is_before:
        takes(made, manager, other)
    manager.free(one)
    if not is_before:
        takes(made, manager, other)
    copies = step_of(made, manager.get_freed_mm_hashes())
    assert torch.equal(engine.work(copies)["a"], embeddings("a", EMBEDDINGS))
    engine.cache.purge()
    assert engine.cache.facts()["ready"] == 0


def test_row_is_whole_pages() -> None:
    assert row_bytes(24, torch.float32) == 8192 and row_bytes(4096, torch.bfloat16) == 512 * 1024
    assert IMAGE == "image"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.spec("H8")
def test_picture_of_a_gpu_comes_back_as_it_was(engine: SeeingEngine) -> None:
    copies, _ = engine.schedule("a")
    there = embeddings("a", EMBEDDINGS).cuda()
    assert engine.copier.save(copies.saves[0], there)
    engine.cache.finish(copies, ["a"])
    [load] = engine.schedule("a")[0].loads
    assert torch.equal(engine.copier.load(load).cuda(), there)
