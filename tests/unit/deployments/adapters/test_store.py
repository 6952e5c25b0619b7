"""Only a checked, immutable copy of an adapter reaches an engine."""

import asyncio
import os
import pickle
import resource
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from arbiter.node import tenant_folders
from deployments.adapters import store as store_module
from deployments.adapters.catalogue import Catalogue, CatalogueEntry
from deployments.adapters.safe_files import AdapterInvalid
from deployments.adapters.store import AdapterNotCopied, CheckedAdapters, Published, Store
from deployments.adapters.validate import Rules
from tests.support.adapters import rewrite_header, write
from tests.support.archives import archive
from tests.support.few_threads import few_threads, is_free
from tests.support.waits import WITHIN_S

SHAPES = {"layers.0.q_proj": (12, 8), "layers.0.v_proj": (4, 8)}
RULES = Rules(SHAPES, max_rank=16)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def entry(folder: Path) -> CatalogueEntry:
    adapter = Catalogue({"chat": folder.parent}).find(folder.name)
    assert adapter is not None
    return adapter


@pytest.mark.spec("F2", "L2")
def test_stored_copy_is_named_by_its_content_and_is_read_only(tmp_path: Path, store: Store) -> None:
    source = write(tmp_path / "in" / "good", SHAPES)
    made = store.publish(entry(source), RULES)
    assert made.path.name == made.digest
    assert all(file.stat().st_mode & 0o222 == 0 for file in made.path.iterdir())
    twin = write(tmp_path / "in" / "twin", SHAPES)
    assert store.publish(entry(twin), RULES) == made
    write(source, SHAPES, rank=4)
    other = store.publish(entry(source), RULES)
    assert other.digest != made.digest and made.path.is_dir()
    assert not [p for p in made.path.parent.iterdir() if p.name.startswith(".copying")]


@pytest.mark.spec("F2")
def test_what_a_killed_engine_was_copying_is_removed_and_what_is_copied_now_stays(
    tmp_path: Path, store: Store
) -> None:
    left, under_way = (tmp_path / "store" / f".copying-{name}" for name in ("left", "under_way"))
    for folder in (left, under_way):
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(b"x")
    os.utime(left, (0, 0))
    store.publish(entry(write(tmp_path / "in" / "good", SHAPES)), RULES)
    assert not left.exists() and under_way.is_dir()


@pytest.mark.spec("E6")
def test_copies_of_a_tenants_own_adapters_lie_apart_and_leave_with_it(
    tmp_path: Path, store: Store
) -> None:
    folder, copies = tmp_path / "in", tmp_path / "store"
    write(folder / "good", SHAPES)
    write(folder / "@acme" / "mine", SHAPES)
    catalogue = Catalogue({"chat": folder})
    common, mine = (catalogue.find(name, "acme") for name in ("good", "mine"))
    assert common and mine
    shared, own = store.publish(common, RULES), store.publish(mine, RULES)
    assert own.digest == shared.digest
    assert (shared.path.parent, own.path.parent) == (copies, copies / "@acme")
    assert store.publish(mine, RULES) == own
    assert tenant_folders.remove((str(copies), str(copies / ".none")), "acme", time.time()) == 1
    assert shared.path.is_dir() and not own.path.parent.exists() and mine.path.is_dir()
    assert not list(copies.glob(".removing*"))
    again = store.publish(mine, RULES)
    assert again == own and own.path.is_dir(), "the tenant has come again"
    assert tenant_folders.remove((str(copies),), "acme", time.time() - 3_600) == 0
    assert tenant_folders.remove((str(copies),), "../store/@acme", time.time()) == 0
    assert own.path.is_dir()


@pytest.mark.spec("F2")
def test_longest_unused_copy_leaves_first_whosever_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write(folder / "@acme" / "mine", SHAPES)
    write(folder / "good", SHAPES, rank=4)
    catalogue = Catalogue({"chat": folder})
    mine, good = catalogue.find("mine", "acme"), catalogue.find("good", "acme")
    assert mine and good
    store = Store(tmp_path / "store", max_bytes=good.size_bytes)
    own = store.publish(mine, RULES)
    assert store.publish(good, RULES).path.is_dir() and not own.path.exists()


@pytest.mark.spec("F3", "E10")
def test_next_engine_finds_the_copy_without_the_weights_until_the_entry_changes(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "in" / "good", SHAPES)
    adapter = entry(source)
    made = store.publish(adapter, RULES)
    following = Store(tmp_path / "store")
    with monkeypatch.context() as patch:
        patch.setattr("deployments.adapters.store._copy", pytest.fail)
        assert following.publish(adapter, RULES) == made
    weights = source / "adapter_model.safetensors"
    times = weights.stat()
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert following.publish(entry(source), RULES).digest != made.digest, "times set back"


@pytest.mark.parametrize("loss", ["copy", "half a note"])
def test_lost_copy_or_note_is_made_again(tmp_path: Path, store: Store, loss: str) -> None:
    adapter = entry(write(tmp_path / "in" / "good", SHAPES))
    made = store.publish(adapter, RULES)
    if loss == "copy":
        shutil.rmtree(made.path)
    else:
        (note,) = (tmp_path / "store" / ".known").iterdir()
        note.write_text(note.read_text()[:9])
    assert store.publish(adapter, RULES) == made
    assert made.path.is_dir()


def test_other_rules_check_again(tmp_path: Path, store: Store) -> None:
    adapter = entry(write(tmp_path / "in" / "good", SHAPES, rank=8))
    store.publish(adapter, RULES)
    with pytest.raises(AdapterInvalid, match="no such module"):
        store.publish(adapter, Rules({"layers.0.q_proj": (12, 8)}, max_rank=16))


def test_notes_have_a_bound(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.adapters.store._MOST_KNOWN", 3)
    for rank in range(1, 9):
        store.publish(entry(write(tmp_path / "in" / f"a{rank}", SHAPES, rank)), RULES)
    assert len(list((tmp_path / "store" / ".known").iterdir())) <= 3


def damaged(file: str, change: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: change(folder / file)


def configured(**fields: Any) -> Callable[[Path], object]:
    return lambda folder: write(folder, SHAPES, **fields)


def headed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda folder: rewrite_header(folder / "adapter_model.safetensors", change)


WEIGHTS = "adapter_model.safetensors"
FIRST = "base_model.model.layers.0.q_proj.lora_A.weight"
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (damaged(WEIGHTS, Path.unlink), "No such file"),
    "empty": (damaged(WEIGHTS, lambda f: f.write_bytes(b"")), "not a safetensors file"),
    "garbage": (damaged(WEIGHTS, lambda f: f.write_bytes(b"\xff" * 500)), "not a safetensors"),
    "a zip": (
        damaged(WEIGHTS, lambda f: f.write_bytes(archive("zip")[:1_000])),
        "not a safetensors",
    ),
    "a pickle": (
        damaged(WEIGHTS, lambda f: f.write_bytes(pickle.dumps([0.0]))),
        "not a safetensors",
    ),
    "a large archive": (damaged(WEIGHTS, lambda f: f.write_bytes(archive("film") * 20)), "larger"),
    "an archive as config": (
        damaged("adapter_config.json", lambda f: f.write_bytes(archive("gzip")[:1_000])),
        "is not JSON",
    ),
    "weights of another name": (
        lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"),
        "adapter_model.safetensors: No such file",
    ),
    "truncated": (damaged(WEIGHTS, lambda f: os.truncate(f, f.stat().st_size - 7)), "of tensors"),
    "trailing": (damaged(WEIGHTS, lambda f: f.write_bytes(f.read_bytes() + b"x")), "of tensors"),
    "huge": (damaged(WEIGHTS, lambda f: os.truncate(f, 5 << 20)), "larger than"),
    "link": (
        lambda folder: (
            (folder / WEIGHTS).rename(folder / "elsewhere"),
            (folder / WEIGHTS).symlink_to(folder / "elsewhere"),
        ),
        "symbolic links",
    ),
    "a pipe": (
        lambda folder: ((folder / WEIGHTS).unlink(), os.mkfifo(folder / WEIGHTS)),
        "not a plain file",
    ),
    "rank above the slots'": (configured(rank=32), "rank 32"),
    "rank not of its tensors": (lambda f: write(f, SHAPES, 32, r=8), "rank 32 is not"),
    "other method": (configured(peft_type="IA3"), "only LORA"),
    "dora": (configured(use_dora=True), "use_dora"),
    "biases": (configured(bias="all"), "biases"),
    "no alpha": (configured(lora_alpha=None), "lora_alpha"),
    "infinite alpha": (configured(lora_alpha=float("inf")), "lora_alpha"),
    "alpha beyond a float": (configured(lora_alpha=10**400), "lora_alpha"),
    "a pattern that never ends": (
        configured(rank_pattern={"(.|.)*[^a-z]": 8}),
        "rank_pattern: .* is no name of a module",
    ),
    "more patterns than modules": (
        configured(alpha_pattern={f"layers.{n}.q_proj": 8 for n in range(3)}),
        "alpha_pattern has not one value",
    ),
    "patterns without values": (configured(rank_pattern=["q_proj"]), "rank_pattern has not"),
    "another model's width": (
        lambda f: write(f, {"layers.0.q_proj": (12, 9)}),
        "do not fit a weight of",
    ),
    "another model's module": (lambda f: write(f, {"layers.7.q_proj": (12, 8)}), "no such module"),
    "half a pair": (headed(lambda h: h.update(x=h.pop(FIRST))), "no lora_A or lora_B"),
    "integers": (headed(lambda h: h[FIRST].update(dtype="I32")), "I32"),
    "overlapping": (headed(lambda h: h[FIRST].update(data_offsets=[0, 8])), "not where"),
    "negative shape": (headed(lambda h: h[FIRST].update(shape=[-8, -8])), "of shape"),
}


@pytest.mark.parametrize("key", ["q_proj", "^layers.0.q_proj", r"layers\.0\.q_proj$", ".*q_proj"])
def test_a_rank_of_its_own_for_a_named_module_is_served(
    tmp_path: Path, store: Store, key: str
) -> None:
    source = write(tmp_path / "in" / "good", SHAPES, rank_pattern={key: 8}, alpha_pattern={key: 3})
    assert store.publish(entry(source), RULES).path.is_dir()


@pytest.mark.spec("F2", "L2", "L3")
@pytest.mark.parametrize(("spoil", "word"), BAD.values(), ids=BAD.keys())
def test_a_bad_adapter_is_refused_with_the_reason_and_nothing_is_kept(
    tmp_path: Path, store: Store, spoil: Callable[[Path], object], word: str
) -> None:
    source = write(tmp_path / "in" / "bad", SHAPES)
    spoil(source)
    with pytest.raises(AdapterInvalid, match=word):
        store.publish(entry(source), RULES)
    assert list((tmp_path / "store").iterdir()) == []


@pytest.mark.spec("F2", "L3")
def test_a_disk_that_takes_no_more_is_no_fault_of_the_adapter(tmp_path: Path, store: Store) -> None:
    source = entry(write(tmp_path / "in" / "good", SHAPES))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))  # a write beyond it fails as on a disk
    try:
        with pytest.raises(AdapterNotCopied, match="File too large") as refused:
            store.publish(source, RULES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert refused.value.status_code == 503, "so that a batch's line is tried again"
    assert store.publish(source, RULES).path.is_dir()


def linked(path: Path, target: Path) -> None:
    path.rename(path.with_name("was-here"))
    path.symlink_to(target)


SWAPPED: dict[str, Callable[[Path], object]] = {
    "its config": lambda folder: linked(folder / "adapter_config.json", folder / "was-here"),
    "its weights": lambda folder: linked(folder / WEIGHTS, folder / "was-here"),
    "itself": lambda folder: linked(folder, folder.parent / "was-here"),
    "its folder": lambda folder: linked(folder.parent, folder.parent.parent / "was-here"),
}


@pytest.mark.spec("F2", "L2")
@pytest.mark.parametrize("swap", SWAPPED.values(), ids=SWAPPED.keys())
def test_file_replaced_by_a_link_after_the_lookup_is_not_copied(
    tmp_path: Path, store: Store, swap: Callable[[Path], object]
) -> None:
    adapter = entry(write(tmp_path / "in" / "good", SHAPES))
    swap(adapter.path)
    with pytest.raises(AdapterInvalid, match=r"symbolic links|Not a directory"):
        store.publish(adapter, RULES)
    assert list((tmp_path / "store").iterdir()) == []


class SlowStore(Store):
    """Copies what is called `cold` when it is allowed to; counts all copies."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.begun, self.allowed, self.copies = threading.Event(), threading.Event(), list[str]()

    def publish(self, entry: CatalogueEntry, rules: Rules) -> Published:
        self.copies.append(entry.name)
        if entry.name == "cold":
            self.begun.set()
            assert self.allowed.wait(60)
        return super().publish(entry, rules)


@pytest.mark.spec("F2")
def test_other_adapters_are_served_while_a_cold_adapter_is_copied(tmp_path: Path) -> None:
    names = ("warm", "cold", "new")
    warm, cold, new = (entry(write(tmp_path / "in" / name, SHAPES)) for name in names)
    store = SlowStore(tmp_path / "store")

    async def story() -> None:
        checked = CheckedAdapters(store, RULES)
        first = await checked.take(warm)
        waiting = [asyncio.ensure_future(checked.take(cold)) for _ in range(3)]
        assert await asyncio.to_thread(store.begun.wait, 10)
        try:
            async with asyncio.timeout(60):
                assert await checked.take(warm) == first
                await checked.take(new)
        finally:
            store.allowed.set()
        assert len({made.digest for made in await asyncio.gather(*waiting)}) == 1

    asyncio.run(story())
    assert sorted(store.copies) == ["cold", "new", "warm"], "each copied once"


@pytest.mark.spec("L3")
async def test_what_an_engine_remembers_of_adapters_renamed_without_end_has_a_bound(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_READ", 3)
    checked, law = CheckedAdapters(store, RULES), write(tmp_path / "in" / "law", SHAPES)
    for number in range(10):
        law = law.rename(tmp_path / "in" / f"law-{number}")
        adapter = entry(law)
        made = await asyncio.gather(*(checked.take(adapter) for _ in range(4)))
        assert all(published is made[0] for published in made), "it is remembered"
        assert len(checked._known) <= 3 and not checked._copying


@pytest.mark.spec("F2")
def test_longest_unused_adapters_make_room_in_the_store(tmp_path: Path) -> None:
    folders = [write(tmp_path / "in" / f"a{rank}", SHAPES, rank) for rank in (4, 5, 6)]
    size = (folders[2] / WEIGHTS).stat().st_size
    store = Store(tmp_path / "store", max_bytes=2 * size)
    first, second = (store.publish(entry(f), RULES) for f in folders[:2])
    os.utime(first.path, ns=(2, 2))
    os.utime(second.path, ns=(1, 1))
    third = store.publish(entry(folders[2]), RULES)
    assert first.path.is_dir() and third.path.is_dir() and not second.path.exists()


@pytest.mark.spec("D5")
async def test_adapters_whose_files_hang_keep_no_thread_of_the_loop(tmp_path: Path) -> None:
    server = threading.Event()

    class Hung(Store):
        def publish(self, entry: CatalogueEntry, rules: Rules) -> Published:
            assert server.wait(WITHIN_S)
            return Published(entry.name, tmp_path, 1)

    checked = CheckedAdapters(Hung(tmp_path / "store"), RULES)
    with few_threads():
        entries = [CatalogueEntry(str(n), "tiny", tmp_path, 1, 1) for n in range(20)]
        taken = [asyncio.ensure_future(checked.take(entry)) for entry in entries]
        await asyncio.sleep(0)
        assert await is_free()
        server.set()
        assert len(await asyncio.gather(*taken)) == 20
