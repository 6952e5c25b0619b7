"""Whatever is served from the pool is what its asker would have computed: mixed traffic of several
tenants, adapters and models over one slab of each content, in which rows are evicted, erased, saved
and restored, writers are killed and the next ones adopt what is left (E2, E5, E6, G2).

The keys are vLLM's own block hashes and our identities of pictures and adapters; the bytes of a row
follow from all that gives it its meaning, and from nothing that its key is made of.
"""

import base64
import contextlib
import hashlib
import io
import os
import time
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.request import Request

from arbiter.pool import Removal, Rows, SavedRows, Slab, SlabView, layout, slab_file
from arbiter.pool.tenants import owner_digest
from arbiter.units import DEFAULT_TENANT, MIB, Bytes, Content
from deployments.engines.vllm.kv.kv_offload import SlabManager
from deployments.engines.vllm.kv.kv_restore import Restorer
from deployments.engines.vllm.pictures.picture_cache import (
    ROW_EMBEDDINGS,
    PictureCache,
    RequestedPicture,
)
from deployments.engines.vllm.pictures.picture_identity import Pictures
from tests.support import slabs
from tests.support.slabs import EXTENT, ROW, TERM_S, run_and_kill, set_limit

SEEDS, LIVES, ACTS = 4, 5, 60
KILL_WITHIN_NS = 40_000_000
CONTENTS = (Content.KV, Content.ADAPTER, Content.PICTURE)
TENANTS = (DEFAULT_TENANT, "acme", "other")
MODELS = ("one", "two")
BLOCK, BLOCKS = 4, 3  # tokens, blocks of a prompt
PROMPTS = range(4)
KV_EXTENTS, EXTENTS = 4, 2  # a quarter of what is asked for, so that rows are evicted
NO_STEP = ScheduleEndContext([], [])


@dataclass(frozen=True)
class Asker:
    """A tenant that asks the base, an adapter of all, or one of its own."""

    tenant: str
    adapter: str = ""
    owner: str = ""  # empty: the adapter is of all

    @property
    def digest(self) -> str:
        """Of the adapter's content."""
        return hashlib.sha256(f"{self.owner} {self.adapter}".encode()).hexdigest()[:32]


ASKERS = [
    Asker(tenant, *adapter)
    for tenant in TENANTS
    for adapter in (("", ""), ("common", ""), ("own", tenant))
]


def meaning(*what: object) -> bytes:
    """The bytes of a row that means this."""
    return hashlib.sha256(repr(what).encode()).digest() * (ROW // 32)


def drawing(number: int) -> str:
    buffer = io.BytesIO()
    Image.fromarray(np.full((2, 2, 3), number, np.uint8)).save(buffer, "png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def namespace(model: str) -> bytes:
    return hashlib.sha256(model.encode()).digest()


def saved_rows(file: Path, model: str) -> SavedRows:
    return SavedRows(file, Content.KV, namespace(model), ROW, time.time())


class PoolUnderTest:
    """The slabs of one node, and the file of the one with KV."""

    def __init__(self, open_files: contextlib.ExitStack, folder: Path) -> None:
        self.folder, self.file = folder, folder / "kv.slab"
        self.fds = {c: open_files.enter_context(slabs.slab_file()) for c in CONTENTS}
        for content, fd in self.fds.items():
            set_limit(fd, KV_EXTENTS if content is Content.KV else EXTENTS)
        self.views = {c: SlabView(fd) for c, fd in self.fds.items()}
        for view in self.views.values():
            open_files.callback(view.close)

    def save(self) -> None:
        """Has the KV leave the RAM."""
        view = self.views[Content.KV]
        most, wanted = Bytes(64 * MIB), lambda: True
        slab_file.save(view, self.file, now_s=time.time(), most_bytes=most, is_wanted=wanted)
        # The next writer finds nothing, as in the new slab that it would be lent.
        Slab(self.fds[Content.KV], Content.KV, bytes(32), ROW, extent_bytes=EXTENT).close()

    def erase(self, removal: Removal) -> None:
        """As the owner of idle slabs."""
        for view in self.views.values():
            view.erase_tenant(removal)
        slab_file.erase_tenant(self.file, removal)

    def has_any(self, removal: Removal) -> bool:
        """Whether a slab or the file has rows that were to leave with a tenant."""
        marks = [mark for view in self.views.values() for _, mark in view.marks()]
        for model in MODELS:
            saved = saved_rows(self.file, model)
            marks += [row.mark for row in saved.sources()]
            saved.close()
        return any(removal.covers(mark.tenant, mark.asked_s) for mark in marks)


class Engine:
    """The parts of one engine that write slabs, driven as vLLM drives them. `served`: how many rows
    it served, by content."""

    def __init__(self, pool: PoolUnderTest, model: str, dice: Random) -> None:
        self.pool, self.model, self.dice = pool, model, dice
        self.slabs = {
            content: Slab(fd, content, namespace(model), ROW, extent_bytes=EXTENT)
            for content, fd in pool.fds.items()
        }
        rows = {content: Rows(slab, TERM_S, time.time) for content, slab in self.slabs.items()}
        restorer = Restorer(rows[Content.KV], saved_rows(pool.file, model), time.time)
        self.kv = SlabManager(rows[Content.KV], restorer)
        self.requests: dict[str, Request] = {}
        self.kv.requests = self.requests
        self.pictures = PictureCache(rows[Content.PICTURE], entries=6)
        self.images = rows[Content.ADAPTER]
        (pool.folder / model).mkdir(exist_ok=True)
        named = SimpleNamespace(model_config=SimpleNamespace(model=str(pool.folder / model)))
        self.identities: Any = Pictures(named, "m", has_cache=True)
        self.numbers = dice.sample(range(1, 100), len(ASKERS))  # vLLM's, of this life
        self.asked = 0
        self.served: Counter[Content] = Counter()

    def chat(self, asker: Asker, prompt: int) -> None:
        """Takes the blocks that are known, and stores the others."""
        self.asked += 1
        asked = ReqContext(str(self.asked))
        keys = self._keys(asked, asker, prompt)
        self.kv.on_new_request(asked)
        wanted = {
            key: meaning(self.model, asker.tenant, asker.adapter and asker.digest, prompt, place)
            for place, key in enumerate(keys)
        }
        known = self._known(asked, keys)
        self._load(asked, known, wanted)
        found = self.kv.prepare_store(keys[len(known) :], asked)
        for key, row in zip(found.keys_to_store, found.store_spec.block_ids, strict=True):
            self.slabs[Content.KV].row(row)[:] = wanted[key]
        is_copied = self.dice.random() < 0.9
        self.kv.complete_store(set(found.keys_to_store), asked, success=is_copied)
        self.kv.on_request_finished(asked)
        del self.requests[asked.req_id]
        self.kv.on_schedule_end(NO_STEP)

    def _keys(self, asked: ReqContext, asker: Asker, prompt: int) -> list[bytes]:
        number, lora = self.numbers[ASKERS.index(asker)], None
        if asker.adapter:
            lora = LoRARequest(asker.digest, number, f"/store/{asker.digest}")
        request = Request(
            asked.req_id,
            [prompt * 100 + place for place in range(BLOCK * BLOCKS)],
            SamplingParams(max_tokens=1),
            None,
            lora_request=lora,
            cache_salt=None if asker.tenant == DEFAULT_TENANT else asker.tenant,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        self.requests[asked.req_id] = request
        keys: list[bytes] = [make_offload_key(each, 0) for each in request.block_hashes]
        for place, key in enumerate(keys, start=1):
            asked.set_offload_key_position(key, place * BLOCK)
        return keys

    def _known(self, asked: ReqContext, keys: list[bytes]) -> list[bytes]:
        while True:
            found = [self.kv.lookup(key, asked) for key in keys]
            if LookupResult.RETRY not in found:
                ends = [n for n, one in enumerate(found) if one is not LookupResult.HIT]
                return keys[: min(ends, default=len(keys))]
            self.kv.on_schedule_end(NO_STEP)

    def _load(self, asked: ReqContext, known: list[bytes], wanted: dict[bytes, bytes]) -> None:
        if not known:
            return
        spec: Any = self.kv.prepare_load(known, asked)
        for key, row in zip(known, spec.block_ids, strict=True):
            assert bytes(self.slabs[Content.KV].row(row)) == wanted[key], asked.req_id
        self.kv.complete_load(known, asked)
        self.served[Content.KV] += len(known)

    def look(self, asker: Asker, number: int) -> None:
        """One step with a picture, of two rows."""
        identity = self.identities.identity(drawing(number), asker.tenant.encode(), "")
        tenant = layout.tenant_digest(asker.tenant)
        self.pictures.expect([RequestedPicture(identity, 2 * ROW_EMBEDDINGS, tenant)])
        self.pictures.promise(identity)
        self.pictures.begin(identity)
        copies = self.pictures.end_step()
        slab, mine = self.slabs[Content.PICTURE], (self.model, asker.tenant, number)
        for load in copies.loads:
            for part, row in load.rows.items():
                assert bytes(slab.row(row)) == meaning("picture", *mine, part)
            self.served[Content.PICTURE] += 1
        for save in copies.saves:
            for part, row in save.rows.items():
                slab.row(row)[:] = meaning("picture", *mine, part)
        self.pictures.finish(copies, [identity])

    def adapt(self, asker: Asker) -> None:
        """Brings the adapter into a slot: out of its image, or makes that."""
        if not asker.adapter:
            return
        key, wanted = bytes.fromhex(asker.digest), meaning("image", self.model, asker.digest)
        if self.images.lookup(key) is not None:
            (row,) = self.images.pin([key])
            assert bytes(self.images.slab.row(row)) == wanted
            self.images.unpin([key])
            self.served[Content.ADAPTER] += 1
            return
        for row in self.images.reserve([key], tenant=owner_digest(asker.owner)).rows.values():
            self.images.slab.row(row)[:] = wanted
            self.images.mark_ready(key, owner_digest(asker.owner))

    def act(self) -> None:
        asker, number = self.dice.choice(ASKERS), self.dice.choice(PROMPTS)
        match self.dice.randrange(12):
            case 0:
                self.adapt(asker)
            case 1 | 2 | 3:
                self.look(asker, number)
            case 4 if self.dice.random() < 0.3:
                self.kv.reset_cache()
            case _:
                self.chat(asker, number)

    def read_all(self) -> None:
        for asker, number in product(ASKERS, PROMPTS):
            self.chat(asker, number)
            self.look(asker, number)
            self.adapt(asker)

    def erase(self, removal: Removal) -> None:
        """As the owner has it done while the slabs are lent."""
        for view in self.pool.views.values():
            assert view.order_erasure(removal)
        slab_file.erase_tenant(self.pool.file, removal)
        self.kv.shrink()
        self.pictures.shrink()
        self.images.shrink_to_limit()
        assert not any(view.must_erase for view in self.pool.views.values())

    def close(self) -> None:
        self.kv.shutdown()
        for slab in self.slabs.values():
            slab.close()


def live(pool: PoolUnderTest, dice: Random) -> Counter[Content]:
    """An engine that ends in order, or loses what it has under way. Returns how much it served."""
    engine = Engine(pool, dice.choice(MODELS), dice)
    engine.read_all()
    for _ in range(ACTS):
        engine.act()
    if dice.random() < 0.5:
        removed = Removal(layout.tenant_digest(dice.choice(TENANTS)), time.time())
        engine.erase(removed)
        assert not pool.has_any(removed)
        engine.read_all()
        assert not pool.has_any(removed), "what left has come back"
    engine.close()
    return engine.served


def live_until_killed(pool: PoolUnderTest, dice: Random) -> None:
    def work(pipe: int) -> None:
        engine = Engine(pool, dice.choice(MODELS), dice)
        os.write(pipe, b".")
        while True:
            engine.act()

    run_and_kill(work, dice.randrange(1 << 30), KILL_WITHIN_NS)


def own(pool: PoolUnderTest, dice: Random) -> None:
    """What a node's agent does with slabs that are idle."""
    if dice.random() < 0.4:
        pool.save()
    if dice.random() < 0.3:
        removed = Removal(layout.tenant_digest(dice.choice(TENANTS)), time.time())
        pool.erase(removed)
        assert not pool.has_any(removed)


@pytest.mark.spec("E2", "E5", "E6", "G2", "H8")
def test_nothing_of_a_tenant_an_adapter_or_a_model_is_served_to_another(tmp_path: Path) -> None:
    init_none_hash(sha256)
    served: Counter[Content] = Counter()
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        dice, folder = Random(seed), tmp_path / str(seed)
        folder.mkdir()
        with contextlib.ExitStack() as files:
            pool = PoolUnderTest(files, folder)
            for _ in range(LIVES):
                live_until_killed(pool, dice)
                own(pool, dice)
                served += live(pool, dice)
                counts += Counter(asdict(pool.views[Content.KV].counts))
                own(pool, dice)
    assert all(served[content] > SEEDS * LIVES for content in CONTENTS), served
    assert counts["evicted_count"] > 0 and counts["restored_count"] > 0, counts
