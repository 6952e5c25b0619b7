"""KV blocks of a killed vLLM engine, found by the next one: the same tokens without the prefill.

In float32, because there a restored block, a block of the device and one computed anew give the
same tokens (bf16 rounds by how a prompt was cut). The test process holds the slab, as an agent
would.
"""

import contextlib
import http.client
import json
import mmap
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from arbiter.node import pool as pools
from arbiter.node.pool import Pool
from arbiter.node.slab_files import SlabFiles
from arbiter.pool import Mark, Removal, SlabView, Term, create, slab_file
from arbiter.pool.layout import EXTENT_BYTES, TERMS_S, tenant_digest
from arbiter.protocol.messages import SlabRequest
from arbiter.units import MIB, Bytes, Content, TicketId
from deployments.messages import KV_TERM
from deployments.requests.prefixes import ROUTE, TERM
from models.train_vision import QUESTIONS
from tests.support.drawings import drawing, uri
from tests.support.engine_host import (
    Child,
    Connection,
    ZygoteUnderTest,
    device_bytes,
    kill,
    killed,
    served,
    tree,
    until,
)
from tests.support.kv_engines import (
    BLOCK,
    STORED,
    VLLM,
    await_rows,
    config,
    facts,
    prompt,
)
from tests.support.slabs import lent_slab, path_of

CHANGED = "tests.support.changed_vllm:build"
CONVERSATIONS, KILLS = 6, 6
STREAMED = 400  # tokens: some hundred steps
DRAFTED_CACHE = 256 * MIB  # half of it are the drafter's layers'


@pytest.fixture
def slab() -> Iterator[int]:
    with lent_slab(128 * MIB) as fd:
        yield fd


def save(slab: int, path: Path) -> int:
    """As an agent does before it drops an idle slab. Returns how many rows the file has."""
    with contextlib.closing(SlabView(slab)) as view:
        most, wanted = Bytes(256 * MIB), lambda: True
        return slab_file.save(view, path, now_s=time.time(), most_bytes=most, is_wanted=wanted)


def ask(
    child: Child,
    tokens: list[int],
    name: str = "tiny",
    most: int = 8,
    salt: str | None = None,
    term: str | None = None,
) -> tuple[Any, int]:
    """What it answers, with log-probabilities, and how many tokens it did not compute."""
    body = {"model": name, "prompt": tokens, "max_tokens": most, "temperature": 0, "logprobs": 2}
    more: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True}
    if salt:
        more["cache_salt"] = salt
    if term:
        more["kv_transfer_params"] = {KV_TERM: term}
    status, answer = child.call("POST", "/v1/completions", {**body, **more})
    assert status == 200, answer
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["token_ids"], cached


@pytest.mark.spec("E1", "E5", "E10", "G4")
def test_next_engine_answers_the_same_without_the_prefill_of_whole_blocks(
    engines: ZygoteUnderTest, tiny: Path, slab: int
) -> None:
    with killed(engines, "first", VLLM, config(tiny, slab)) as child:
        cold = ask(child, prompt(1))
        assert cold[1] == 0
        await_rows(child, STORED)
        assert ask(child, prompt(1)) == (cold[0], STORED * BLOCK)
        ask(child, prompt(7))
        await_rows(child, 2 * STORED)
    with contextlib.closing(SlabView(slab)) as view:
        assert (view.content, view.ready_count) == (Content.KV, 2 * STORED)
        row_bytes = view.geometry.row_bytes if view.geometry else 0
    without_a_file = with_file(config(tiny, slab), Path("/nonexistent/a.slab"))
    with served(engines, "second", VLLM, without_a_file) as child:
        assert ask(child, prompt(1)) == (cold[0], STORED * BLOCK)
        assert facts(child)["loaded"] == STORED
        before = reads(child)  # the first request has imported what it needs
        assert ask(child, prompt(7))[1] == STORED * BLOCK
        by_calls, from_disk = (after - b for after, b in zip(reads(child), before, strict=True))
        assert by_calls < STORED * row_bytes and from_disk == 0, "they came from the mapping"
        assert ask(child, prompt(2))[1] == 0


def reads(child: Child) -> tuple[int, int]:
    """Bytes that its processes have read: by calls of the kernel, and from disks (proc(5))."""
    rows = [Path(f"/proc/{pid}/io").read_text().split() for pid in tree(child.pid)]
    found = [dict(zip(row[::2], map(int, row[1::2]), strict=True)) for row in rows]
    return sum(row["rchar:"] for row in found), sum(row["read_bytes:"] for row in found)


@pytest.fixture
def next_slab() -> Iterator[int]:
    """What an agent lends after it dropped the first: an empty one."""
    with lent_slab(128 * MIB) as fd:
        yield fd


def with_file(given: dict[str, Any], file: Path) -> dict[str, Any]:
    return {**given, "slabs": {"kv": {**given["slabs"]["kv"], "file": str(file)}}}


@pytest.mark.spec("G4")
def test_conversation_that_had_to_leave_the_ram_comes_back_from_its_file(
    engines: ZygoteUnderTest, tiny: Path, slab: int, next_slab: int, tmp_path: Path
) -> None:
    with killed(engines, "saved", VLLM, config(tiny, slab)) as child:
        cold = {n: ask(child, prompt(n)) for n in (30, 31)}
        await_rows(child, 2 * STORED)
    file = tmp_path / "a.slab"
    assert save(slab, file) == 2 * STORED
    given = with_file(config(tiny, next_slab), file)
    with served(engines, "restores", VLLM, given) as child:
        assert ask(child, prompt(30)) == (cold[30][0], STORED * BLOCK)
        assert facts(child)["restored"] == STORED, "row by row, those that were asked for"
        assert ask(child, prompt(32))[1] == 0
        assert ask(child, prompt(31)) == (cold[31][0], STORED * BLOCK)
        assert facts(child)["restored"] == 2 * STORED
        assert child.call("POST", "/control/sleep")[0] == 200
        assert child.call("POST", "/control/wake")[0] == 200
        assert ask(child, prompt(30)) == (cold[30][0], STORED * BLOCK)
        assert facts(child)["restored"] == 2 * STORED, "from RAM"


def lent(pool: Pool, ticket: TicketId, model: Path) -> dict[str, Any]:
    """The configuration of an engine, with what the pool lends to it."""
    wanted = SlabRequest(Content.KV, "chat/tiny", "key")
    fd, file = pool.lend(ticket, wanted), pool.file_for(wanted)
    assert fd is not None
    given = {"path": path_of(fd)} | ({"file": file} if file else {})
    return {**config(model, None), "slabs": {"kv": given}}


@pytest.mark.spec("E4", "E7", "G4")
def test_pool_under_pressure_saves_what_the_next_engine_restores(
    engines: ZygoteUnderTest, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = SlabFiles(tmp_path / "slabs", Bytes(64 * MIB))
    with contextlib.closing(Pool(Bytes(256 * MIB), files)) as pool:
        first, second = TicketId("under-pressure"), TicketId("after-pressure")
        with killed(engines, first, VLLM, lent(pool, first, tiny)) as child:
            cold = ask(child, prompt(36))
            await_rows(child, STORED)
        pool.take_back(first)
        with monkeypatch.context() as patch:
            pool._kept_free_bytes = 10**9
            available = Bytes(10**9 - pool.allocated_bytes)
            patch.setattr(pools.procfs, "ram", lambda: (Bytes(10**12), available))
            until(lambda: pool.enforce_budget() or bool(pool.dropped()), 60)
        [gone] = pool.dropped()
        assert (gone.reason, gone.was_saved, pool.allocated_bytes) == ("pressure", True, 0)
        with served(engines, second, VLLM, lent(pool, second, tiny)) as child:
            assert ask(child, prompt(36)) == (cold[0], STORED * BLOCK)
            [reading] = pool.readings()
            assert (reading.restored_count, reading.rows_count) == (STORED, STORED)


@pytest.mark.spec("G4")
def test_conversations_asked_at_once_come_back_together(
    engines: ZygoteUnderTest, tiny: Path, slab: int, next_slab: int, tmp_path: Path
) -> None:
    numbers = range(40, 40 + CONVERSATIONS)
    with killed(engines, "saved-many", VLLM, config(tiny, slab)) as child:
        cold = {n: ask(child, prompt(n)) for n in numbers}
        await_rows(child, CONVERSATIONS * STORED)
    file = tmp_path / "a.slab"
    save(slab, file)
    with (
        served(engines, "restores-many", VLLM, with_file(config(tiny, next_slab), file)) as child,
        ThreadPoolExecutor(CONVERSATIONS) as pool,
    ):
        found = dict(zip(numbers, pool.map(lambda n: ask(child, prompt(n)), numbers), strict=True))
        assert {n: a for n, (a, _) in found.items()} == {n: a for n, (a, _) in cold.items()}
        assert {cached for _, cached in found.values()} == {STORED * BLOCK}


@pytest.mark.spec("E6", "E7", "G2", "G4")
def test_rows_name_tenant_and_term_and_no_tenant_gets_those_of_another_from_a_file(
    engines: ZygoteUnderTest, tiny: Path, slab: int, next_slab: int, tmp_path: Path
) -> None:
    with killed(engines, "of-tenants", VLLM, config(tiny, slab)) as child:
        cold = ask(child, prompt(34), salt="acme", term="extended")
        assert ask(child, prompt(35), term="short")[1] == 0
        await_rows(child, 2 * STORED)
        half = STORED // 2
        assert ask(child, prompt(35, half * BLOCK + 1))[1] == half * BLOCK
        until(lambda: terms_of(slab)[(bytes(16), Term.LONG)] == half, 60)
    acme, asked_s = tenant_digest("acme"), time.time()
    assert terms_of(slab) == {
        (acme, Term.EXTENDED): STORED,
        (bytes(16), Term.SHORT): STORED - half,
        (bytes(16), Term.LONG): half,
    }
    for mark in marks_of(slab):
        assert 0 < asked_s + TERMS_S[Term(mark.kind)] - mark.expires_s < 60
    file = tmp_path / "a.slab"
    save(slab, file)
    given = with_file(config(tiny, next_slab), file)
    with served(engines, "of-tenants-2", VLLM, given) as child:
        assert [ask(child, prompt(34), salt=salt)[1] for salt in ("other", None)] == [0, 0]
        assert ask(child, prompt(34), salt="acme") == (cold[0], STORED * BLOCK)
        assert facts(child)["restored"] == STORED
        assert facts(child)["restore_ns"] > 0 and facts(child)["load_ns"] > 0
    with contextlib.closing(SlabView(next_slab)) as view:
        assert [mark.tenant for _, mark in view.marks()].count(acme) == STORED


def marks_of(slab: int) -> list[Mark]:
    with contextlib.closing(SlabView(slab)) as view:
        return [mark for _, mark in view.marks()]


def terms_of(slab: int) -> Counter[tuple[bytes, Term]]:
    """How many rows have each tenant and class."""
    return Counter((mark.tenant, Term(mark.kind)) for mark in marks_of(slab))


@pytest.mark.spec("G4")
def test_every_route_that_generates_takes_the_term(
    engines: ZygoteUnderTest, tiny: Path, slab: int
) -> None:
    """Each stores blocks of its own, because its text begins otherwise."""
    routes = {"chat/completions": "messages", "messages": "messages", "responses": "input"}
    with served(engines, "terms", VLLM, config(tiny, slab)) as child:
        for number, (route, field) in enumerate(routes.items(), start=1):
            said = [{"role": "user", "content": f"{number}. " + "word " * 300}]
            body = {"model": "tiny", field: said, "kv_transfer_params": {KV_TERM: "short"}}
            most = "max_output_tokens" if route == "responses" else "max_tokens"
            status, answer = child.call("POST", f"/v1/{route}", {**body, most: 2})
            assert status == 200, answer
            await_rows(child, 3 * number)
            assert len(marks_of(slab)) < 6 * number, "the route before stored all of these"
        said = [{"role": "user", "content": "4. " + "word " * 300}]
        prefix = {"model": "tiny", "messages": said, "next_role": "assistant"}
        status, answer = child.call("POST", ROUTE, {**prefix, TERM: {KV_TERM: "short"}})
        assert status == 200, answer
        await_rows(child, 3 * (len(routes) + 1))
        assert set(terms_of(slab)) == {(bytes(16), Term.SHORT)}


@pytest.mark.spec("E6", "E7")
def test_tenant_has_no_more_rows_than_its_cap_and_leaves_none_when_it_is_removed(
    engines: ZygoteUnderTest, tiny: Path, slab: int
) -> None:
    given = config(tiny, slab)
    given["slabs"]["kv"]["caps"] = {"acme": 0.03}
    acme = tenant_digest("acme")
    with (
        served(engines, "of-capped", VLLM, given) as child,
        contextlib.closing(SlabView(slab)) as owner,
    ):
        ask(child, prompt(36), salt="acme")
        ask(child, prompt(36), salt="other")
        await_rows(child, STORED + 1)
        until(lambda: facts(child)["refused"] > 0, 60)
        shape = owner.geometry
        assert shape is not None
        permitted = (owner.limit_bytes - shape.table_end) // EXTENT_BYTES * EXTENT_BYTES
        cap = int(0.03 * (permitted // shape.row_bytes))
        assert 0 < cap < STORED
        held = Counter(mark.tenant for _, mark in owner.marks())
        assert held == {acme: cap, tenant_digest("other"): STORED}
        assert facts(child)["refused"] == STORED - cap
        assert child.call("POST", "/control/cap_slabs", {"caps": {"acme": 0.02}})[0] == 200
        lower = int(0.02 * (permitted // shape.row_bytes))
        held = Counter(mark.tenant for _, mark in owner.marks())
        assert 0 < lower < cap and held == {acme: lower, tenant_digest("other"): STORED}
        assert child.call("POST", "/control/cap_slabs", {"caps": {}})[0] == 200
        ask(child, prompt(36), salt="acme")
        await_rows(child, 2 * STORED)
        assert owner.order_erasure(Removal(acme))
        assert child.call("POST", "/slab")[0] == 200
        assert not owner.must_erase
        assert Counter(mark.tenant for _, mark in owner.marks()) == {tenant_digest("other"): STORED}
        assert ask(child, prompt(36), salt="other")[1] == STORED * BLOCK


def flip_bytes(path: Path) -> None:
    """In the first block of the conversation: the others are of no use without it."""
    with path.open("r+b") as stream:
        for place in range(8192, path.stat().st_size, 4096):
            stream.seek(place)
            stream.write(b"?!")


def cut_in_half(path: Path) -> None:
    """The table names rows that are no longer there; the first rows are."""
    os.truncate(path, path.stat().st_size // 2)


def leave_100_bytes(path: Path) -> None:
    os.truncate(path, 100)


def put_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.spec("G4")
def test_damaged_file_is_a_cold_prefill_of_what_is_missing_without_an_error(
    engines: ZygoteUnderTest, tiny: Path, slab: int, tmp_path: Path
) -> None:
    with killed(engines, "saved-well", VLLM, config(tiny, slab)) as child:
        cold = ask(child, prompt(33))
        await_rows(child, STORED)
    file = tmp_path / "a.slab"
    left = {flip_bytes: 0, cut_in_half: STORED // 2, leave_100_bytes: 0, put_a_folder: 0}
    for damage, known in left.items():
        if file.is_file() or not file.exists():
            file.unlink(missing_ok=True)
            save(slab, file)
        damage(file)
        fd = create("empty", Bytes(256 * MIB))
        with contextlib.closing(SlabView(fd)) as view:
            view.limit_bytes = Bytes(128 * MIB)
        given = with_file(config(tiny, fd), file)
        with served(engines, damage.__name__, VLLM, given) as child:
            answer, cached = ask(child, prompt(33))
            assert answer == cold[0]
            assert abs(cached - known * BLOCK) <= BLOCK, damage.__name__
            await_rows(child, STORED)
            assert ask(child, prompt(33)) == (cold[0], STORED * BLOCK)
        os.close(fd)


@pytest.mark.spec("G4")
def test_what_the_model_has_said_is_kept_too(
    engines: ZygoteUnderTest, tiny: Path, slab: int
) -> None:
    with killed(engines, "said", VLLM, config(tiny, slab)) as child:
        said, _ = ask(child, prompt(3, 200), most=250)
        await_rows(child, 3)
    with served(engines, "goes-on", VLLM, config(tiny, slab)) as child:
        assert ask(child, prompt(3, 200) + said)[1] == 3 * BLOCK


@pytest.mark.spec("E2", "G2")
def test_adapters_see_their_own_blocks_only_also_in_the_next_engine(
    engines: ZygoteUnderTest, tiny: Path, slab: int
) -> None:
    with killed(engines, "adapted", VLLM, config(tiny, slab)) as child:
        base, adapted = ask(child, prompt(4)), ask(child, prompt(4), "a0")
        assert (base[1], adapted[1]) == (0, 0)
        await_rows(child, 2 * STORED)
    with served(engines, "adapted-2", VLLM, config(tiny, slab)) as child:
        assert ask(child, prompt(4), "a1")[1] == 0
        assert ask(child, prompt(4), "a0") == (adapted[0], STORED * BLOCK)
        assert ask(child, prompt(4)) == (base[0], STORED * BLOCK)


OTHER_ARGUMENTS: dict[str, dict[str, Any]] = {
    "weights": {},
    "version": {},
    "context": {"max_model_len": 1536},
    "block": {"block_size": BLOCK // 2},
    "precision": {"dtype": "bfloat16"},
    "hash": {"prefix_caching_hash_algo": "sha256_cbor"},
    "parallelism": {"tensor_parallel_size": 2},
}


@dataclass(frozen=True, slots=True)
class Known:
    """What an engine that was killed has answered, and the slab that it left, also as a file."""

    answer: Any
    slab: int
    file: Path


@pytest.fixture(scope="module")
def known(
    engines: ZygoteUnderTest, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Known]:
    file = tmp_path_factory.mktemp("known") / "a.slab"
    with lent_slab(128 * MIB) as fd:
        with killed(engines, "known", VLLM, config(tiny, fd)) as child:
            cold = ask(child, prompt(5))
            await_rows(child, STORED)
        save(fd, file)
        yield Known(cold[0], fd, file)


def copied(source: int, target: int) -> None:
    """The bytes of a slab, so that the next engine that spoils it spoils a copy."""
    os.ftruncate(target, os.fstat(source).st_size)
    place = 0
    while place < os.fstat(source).st_size:
        place += os.sendfile(target, source, place, 1 << 30)


@pytest.mark.spec("E2", "G2")
@pytest.mark.parametrize("change", [*OTHER_ARGUMENTS, "nothing"])
def test_another_namespace_finds_nothing_and_answers_as_without_a_slab(
    engines: ZygoteUnderTest, tiny: Path, slab: int, known: Known, change: str
) -> None:
    """And with nothing changed, all of it: from the copy of the slab."""
    copied(known.slab, slab)
    other = with_file(config(tiny, slab, **OTHER_ARGUMENTS.get(change, {})), known.file)
    if change == "weights":
        other["slabs"]["kv"]["model_digest"] = "of other weights"
    entry = CHANGED if change == "version" else VLLM
    with served(engines, f"other-{change}", entry, other) as child:
        answer, cached = ask(child, prompt(5))
        assert cached == (STORED * BLOCK if change == "nothing" else 0)
        assert answer == known.answer or change == "precision"


@pytest.mark.spec("E2", "G4")
def test_rows_of_a_model_of_two_processes_are_found_by_the_next_of_two(
    engines: ZygoteUnderTest, tiny: Path, slab: int
) -> None:
    """Of each row either process has its part."""
    two = config(tiny, slab, tensor_parallel_size=2)
    with served(engines, "two-first", VLLM, two) as child:
        cold = ask(child, prompt(5))
        await_rows(child, STORED)
    with served(engines, "two-next", VLLM, two) as child:
        assert ask(child, prompt(5)) == (cold[0], STORED * BLOCK)


def spoil_header(memory: mmap.mmap) -> None:
    memory[0:64] = bytes(range(64))


def spoil_first_marks(memory: mmap.mmap) -> None:
    """Blocks that are found only with all before them: so none is."""
    memory[4096 : 4096 + 12 * 128] = b"\xa5" * (12 * 128)


@pytest.mark.spec("E5", "G4")
@pytest.mark.parametrize("damage", [spoil_header, spoil_first_marks])
def test_damaged_slab_is_a_cold_prefill_without_an_error(
    engines: ZygoteUnderTest, tiny: Path, slab: int, damage: Any
) -> None:
    with killed(engines, damage.__name__, VLLM, config(tiny, slab)) as child:
        cold = ask(child, prompt(6))
        await_rows(child, STORED)
    with contextlib.closing(mmap.mmap(slab, os.fstat(slab).st_size)) as memory:
        damage(memory)
    with served(engines, f"{damage.__name__}-2", VLLM, config(tiny, slab)) as child:
        assert ask(child, prompt(6)) == (cold[0], 0)
        await_rows(child, STORED)


def kill_in_traffic(engines: ZygoteUnderTest, ticket: str, given: Any, seed: int) -> list[Any]:
    """Asks all conversations at once and kills the engine after some of the answers, which it
    returns with the number of each."""
    answered: list[Any] = []

    def one(number: int) -> None:
        # Requests in flight are cut off, or told that the engine is dead.
        with contextlib.suppress(OSError, http.client.HTTPException, AssertionError):
            answered.append((number, ask(child, prompt(number), most=4)[0]))

    with killed(engines, ticket, VLLM, given) as child, ThreadPoolExecutor(CONVERSATIONS) as pool:
        order = Random(seed).sample(range(CONVERSATIONS), CONVERSATIONS)
        running = [pool.submit(one, number) for number in order]
        until(lambda: len(answered) >= seed % 4, 60)
        kill(child)
        wait(running)
    return answered


@pytest.mark.spec("E5")
def test_answers_stay_equal_however_often_an_engine_is_killed_in_mid_traffic(
    engines: ZygoteUnderTest, tiny: Path, slab: int
) -> None:
    with served(engines, "without", VLLM, config(tiny, None)) as child:
        right = {n: ask(child, prompt(n), most=4)[0] for n in range(CONVERSATIONS)}
    for seed in range(KILLS):
        for number, answer in kill_in_traffic(engines, f"kill-{seed}", config(tiny, slab), seed):
            assert answer == right[number]
    with served(engines, "survivor", VLLM, config(tiny, slab)) as child:
        found = {n: ask(child, prompt(n), most=4) for n in right}
        assert {n: answer for n, (answer, _) in found.items()} == right
        assert facts(child)["loaded"] > 0


@pytest.mark.spec("E3", "E4", "E5", "E7")
def test_full_slab_evicts_and_every_answer_stays_right(
    engines: ZygoteUnderTest, tiny: Path, slab: int
) -> None:
    """One extent of 64 rows, for conversations of more blocks than that."""
    with contextlib.closing(SlabView(slab)) as view:
        view.limit_bytes = Bytes(33 * MIB)
    numbers = range(20, 28)
    with killed(engines, "crowded", VLLM, config(tiny, slab)) as child:
        cold = {n: ask(child, prompt(n)) for n in numbers}
        until(lambda: facts(child)["evicted"] >= len(numbers) * STORED - 64, 60)
        assert facts(child)["allocated_bytes"] <= 33 * MIB
    with (
        served(engines, "crowded-2", VLLM, config(tiny, slab)) as child,
        ThreadPoolExecutor(len(numbers)) as pool,
        contextlib.closing(SlabView(slab)) as view,
    ):
        again = {n: ask(child, prompt(n)) for n in reversed(numbers)}
        right = {n: a for n, (a, _) in cold.items()}
        assert {n: a for n, (a, _) in again.items()} == right
        assert again[27][1] == STORED * BLOCK, "the last conversation was whole"
        loaded = facts(child)["loaded"]
        assert child.call("POST", "/control/sleep")[0] == 200  # the device forgets them
        assert child.call("POST", "/control/wake")[0] == 200
        at_once = [(n, pool.submit(ask, child, prompt(n))) for n in numbers]
        until(lambda: facts(child)["loaded"] > loaded, 60)
        while not all(asked.done() for _, asked in at_once):
            for limit in (0, 33 * MIB):
                view.limit_bytes = Bytes(limit)
                assert child.call("POST", "/slab")[0] == 200
        assert {n: asked.result()[0] for n, asked in at_once} == right
        view.limit_bytes = Bytes(0)
        until(lambda: child.call("POST", "/slab")[1]["kv"]["ready"] == 0, 10)  # no pin is left


def drafted(tiny: Path, slab: int) -> dict[str, Any]:
    given = config(tiny, slab, kv_cache_memory_bytes=DRAFTED_CACHE)
    for name in ("enable_lora", "max_loras", "max_lora_rank", "lora_modules"):
        del given["engine_args"][name]
    return {**given, "drafter": {"model": str(tiny), "tokens": 3}}


@pytest.mark.spec("F9", "E2")
def test_blocks_hold_the_drafters_layers_too(
    engines: ZygoteUnderTest, tiny: Path, slab: int
) -> None:
    given = drafted(tiny, slab)
    alone = json.loads(json.dumps(given))
    del alone["drafter"]
    with killed(engines, "drafted", VLLM, given) as child:
        cold = ask(child, prompt(10))
        await_rows(child, STORED)
    with killed(engines, "drafted-2", VLLM, given) as child:
        answer, cached = ask(child, prompt(10))
        assert (answer, cached > 0) == (cold[0], True)
    with served(engines, "undrafted", VLLM, alone) as child:
        assert ask(child, prompt(10)) == (cold[0], 0)


def drop(child: Child) -> bool:
    status, said = child.call("POST", "/control/drop_drafter")
    assert status == 200, said
    dropped: bool = said["dropped"]
    return dropped


def answer_dropped_in_the_middle(child: Child, tokens: list[int]) -> list[int]:
    body = {"model": "tiny", "prompt": tokens, "max_tokens": STREAMED, "temperature": 0}
    more = {"ignore_eos": True, "return_token_ids": True, "stream": True}
    line = Connection(child.path)
    head = {"content-type": "application/json"}
    line.request("POST", "/v1/completions", json.dumps({**body, **more}), head)
    said: list[int] = []
    with line.getresponse() as response:
        assert response.status == 200
        for raw in response:
            if not raw.startswith(b"data: {"):
                continue
            said += json.loads(raw[6:])["choices"][0]["token_ids"]
            if len(said) < STREAMED // 2 and "dropped" not in more:
                more["dropped"] = drop(child)
    line.close()
    assert more["dropped"] is True
    return said


@pytest.mark.spec("F9")
def test_drafter_leaves_in_the_middle_of_an_answer_which_goes_on_the_same(
    engines: ZygoteUnderTest, tiny: Path, slab: int
) -> None:
    given = drafted(tiny, slab)
    with killed(engines, "leaves", VLLM, given) as child:
        expected, _ = ask(child, prompt(41), most=STREAMED)
        until(lambda: device_bytes(child.pid) > DRAFTED_CACHE, 30)  # it has all its pages
        before = device_bytes(child.pid)
        assert answer_dropped_in_the_middle(child, prompt(41)) == expected
        # What answers take beside the cache may have grown a little meanwhile.
        until(lambda: before - device_bytes(child.pid) > 0.9 * DRAFTED_CACHE / 2, 60)
        assert drop(child), "it has left, however often it is asked to"
        alone, _ = ask(child, prompt(43))
        assert ask(child, prompt(43)) == (alone, STORED * BLOCK)  # in the engine's own cache
    with served(engines, "has-it-again", VLLM, given) as child:
        assert ask(child, prompt(43)) == (alone, 0), "blocks without the drafter's layers are kept"
        answer, cached = ask(child, prompt(41), most=STREAMED)
        assert answer == expected and cached >= STORED * BLOCK


@pytest.mark.spec("H2", "L1")
def test_model_that_sees_takes_pictures_and_no_embeddings_beside_a_slab(
    engines: ZygoteUnderTest, describer: Path, slab: int
) -> None:
    """A connector alone would have vLLM accept embeddings from clients."""
    given = {
        "model": str(describer),
        "served_name": "eyes",
        "slabs": config(describer, slab)["slabs"],
    }
    args = {"max_model_len": 1024, "kv_cache_memory_bytes": 32 * MIB, "dtype": "float32"}
    given["engine_args"] = {**args, "max_num_seqs": 4, "enable_prompt_tokens_details": True}
    url = {"type": "image_url", "image_url": {"url": uri(drawing(3))}}
    question = {"type": "text", "text": QUESTIONS["describe"][0] + " Look again." * 40}

    def look(child: Child, part: dict[str, Any]) -> tuple[int, Any]:
        body = {"messages": [{"role": "user", "content": [part, question]}], "temperature": 0}
        return child.call("POST", "/v1/chat/completions", {**body, "max_tokens": 12})

    with killed(engines, "eyes", VLLM, given) as child:
        status, cold = look(child, url)
        assert status == 200, cold
        await_rows(child, 1)
        status, said = look(child, {"type": "image_embeds", "image_embeds": "AAAA"})
        assert (status, "--enable-mm-embeds" in json.dumps(said)) == (400, True), said
    with served(engines, "eyes-2", VLLM, given) as child:
        _, seen = look(child, url)
        assert seen["choices"][0]["message"] == cold["choices"][0]["message"]
        assert seen["usage"]["prompt_tokens_details"]["cached_tokens"] >= BLOCK


@pytest.mark.spec("D1", "E4", "E6", "G4")
def test_blocks_come_back_after_sleep_and_wake_and_asleep_the_engine_erases_and_shrinks(
    engines: ZygoteUnderTest, tiny: Path, slab: int
) -> None:
    with (
        served(engines, "sleeps", VLLM, config(tiny, slab)) as child,
        contextlib.closing(SlabView(slab)) as owner,
    ):
        cold = ask(child, prompt(7))
        ask(child, prompt(6), salt="acme")
        await_rows(child, 2 * STORED)
        for turn in (1, 2):
            assert child.call("POST", "/control/sleep")[0] == 200
            assert child.call("POST", "/control/wake")[1]["verified"] is True
            assert ask(child, prompt(7)) == (cold[0], STORED * BLOCK)
            assert facts(child)["loaded"] == turn * STORED
        assert child.call("POST", "/control/sleep")[0] == 200
        assert owner.order_erasure(Removal(tenant_digest("acme")))
        assert child.call("POST", "/control/shrink_slabs") == (200, {"shrinks": True})
        assert not owner.must_erase
        assert {mark.tenant for mark in marks_of(slab)} == {bytes(16)}
        before, owner.limit_bytes = owner.allocated_bytes, Bytes(0)
        assert child.call("POST", "/control/shrink_slabs")[0] == 200
        assert owner.ready_count == 0 and owner.allocated_bytes <= before - 32 * MIB
        assert child.call("POST", "/control/wake")[1]["verified"] is True
        assert ask(child, prompt(7)) == (cold[0], 0)


@pytest.mark.spec("E1", "E4")
def test_idle_engine_gives_memory_back_when_it_is_told_that_its_limit_fell(
    engines: ZygoteUnderTest, tiny: Path, slab: int
) -> None:
    with served(engines, "shrinks", VLLM, config(tiny, slab)) as child:
        cold = ask(child, prompt(8))
        await_rows(child, STORED)
        before = os.fstat(slab).st_blocks * 512
        with contextlib.closing(SlabView(slab)) as view:
            view.limit_bytes = Bytes(0)
        status, said = child.call("POST", "/slab")
        assert (status, said["kv"]["ready"], said["kv"]["evicted"]) == (200, 0, STORED)
        assert os.fstat(slab).st_blocks * 512 <= before - 32 * MIB
        assert child.call("POST", "/control/sleep")[0] == 200
        assert child.call("POST", "/control/wake")[0] == 200
        assert ask(child, prompt(8)) == (cold[0], 0)
        assert facts(child)["refused"] >= STORED


@pytest.mark.spec("E1", "G6")
@pytest.mark.parametrize("why", ["no prefix cache", "no slab", "unusable slab"])
def test_model_that_cannot_use_a_slab_loads_as_without_one(
    engines: ZygoteUnderTest, tiny: Path, slab: int, why: str
) -> None:
    more = {"enable_prefix_caching": False} if why == "no prefix cache" else {}
    given = config(tiny, None if why == "no slab" else slab, **more)
    if why == "unusable slab":
        given["slabs"]["kv"]["path"] = "/dev/null"
    with served(engines, why.replace(" ", "-"), VLLM, given) as child:
        assert len(ask(child, prompt(9, 300))[0]) == 8
        assert child.call("GET", "/slab")[0] == 404
        status, said = child.call("POST", "/prewarm", {"model": "tiny", "messages": []})
        assert (status, "has_no_cache" in said) == (200, why == "no prefix cache")


@pytest.mark.spec("E1")
def test_pooling_model_loads_and_answers_beside_a_slab(
    engines: ZygoteUnderTest, tiny: Path, slab: int
) -> None:
    given = config(tiny, slab, runner="pooling", convert="embed")
    for name in ("enable_lora", "max_loras", "max_lora_rank", "lora_modules"):
        del given["engine_args"][name]
    with served(engines, "pools", VLLM, given) as child:
        status, said = child.call("POST", "/v1/embeddings", {"input": ["one", "two"]})
        assert (status, len(said["data"])) == (200, 2)
        assert child.call("GET", "/slab")[0] == 404
