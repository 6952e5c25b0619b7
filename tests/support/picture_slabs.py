"""A slab of pictures, and a scheduler and a worker over it, without vLLM."""

import contextlib
import hashlib
import os
from collections.abc import Collection, Iterator

import torch

from arbiter.pool import Rows, Slab, SlabFile, SlabView, create, layout
from arbiter.units import MIB, Bytes, Content
from deployments.engines.vllm.pictures.picture_cache import (
    ENTRIES,
    TERM_S,
    Copies,
    PictureCache,
    RequestedPicture,
)
from deployments.engines.vllm.pictures.picture_connector import Copier, row_bytes
from tests.support.slabs import NAMESPACE, Clock

WIDTH, DTYPE = 24, torch.bfloat16
ROW = row_bytes(WIDTH, DTYPE)
CAPACITY = Bytes(6 * MIB)
EMBEDDINGS = 16  # of most pictures here: one row


@contextlib.contextmanager
def picture_slab_file() -> Iterator[int]:
    """An empty one, all of which may be used."""
    made = create("test", CAPACITY)
    set_limit(made, CAPACITY)
    yield made
    os.close(made)


def set_limit(fd: int, limit: Bytes) -> None:
    with contextlib.closing(SlabView(fd)) as view:
        view.limit_bytes = limit


@contextlib.contextmanager
def opened(
    fd: int, clock: Clock, extent: int = ROW, entries: int = ENTRIES
) -> Iterator["SeeingEngine"]:
    """As the next engine finds the slab. `extent`: bytes that it grows by."""
    slab = Slab(fd, Content.PICTURE, NAMESPACE, ROW, extent_bytes=Bytes(extent))
    file = SlabFile(fd)
    with contextlib.closing(slab):
        yield SeeingEngine(
            PictureCache(Rows(slab, TERM_S, clock), entries), Copier(file, WIDTH, DTYPE)
        )


def embeddings(name: str, count: int) -> torch.Tensor:
    """What the encoder makes of a picture."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)).to(DTYPE)


class SeeingEngine:
    """A scheduler and a worker that see pictures."""

    def __init__(self, cache: PictureCache, copier: Copier) -> None:
        self.cache, self.copier = cache, copier

    def expect(self, *names: str, counts: dict[str, int]) -> None:
        tenant = layout.tenant_digest("acme")
        self.cache.expect(
            RequestedPicture(name, counts.get(name, EMBEDDINGS), tenant) for name in names
        )

    def schedule(
        self, *names: str, counts: dict[str, int] | None = None, unread: Collection[str] = ()
    ) -> tuple[Copies, list[bool]]:
        """One step with these pictures, and which of them were promised. `unread`: those of
        requests that were preempted in it."""
        self.expect(*names, counts=counts or {})
        promised = []
        for name in names:
            promised.append(self.cache.promise(name))
            self.cache.begin(name)
        return self.cache.end_step(unread), promised

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
        copies, promised = self.schedule(*names, counts=dict.fromkeys(names, count))
        for name, loaded in self.work(copies).items():
            assert torch.equal(loaded, embeddings(name, count))
        return promised

    @property
    def counts(self) -> tuple[int, int]:
        facts = self.cache.facts()
        return facts["hits"], facts["misses"]
