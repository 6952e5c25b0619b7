"""Adapters in a vLLM child: by name from a folder, many in one batch, each failing alone."""

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from arbiter.core.types import Priority
from deployments import messages
from deployments.config.safetensors_header import linear_shapes
from deployments.engines.vllm.batching.batch_gate import AHEAD, MAX_WAITING
from tests.support.adapters import write
from tests.support.engine_host import Child, Connection, ZygoteUnderTest, served, until

VLLM = "deployments.engines.vllm.engine:build"
COUNT = 24
PROMPT = [(i * 37) % 2000 + 3 for i in range(40)]
NAMES = tuple(f"a{i}" for i in range(8))
BATCH = 256  # F4


def config(tiny: Path, folder: Path, slots: int, wait_s: float) -> dict[str, Any]:
    adapters = {"folder": str(folder / "in"), "store": str(folder / "store"), "max_rank": 16}
    args = {"dtype": "float32", "kv_cache_memory_bytes": 64 << 20, "max_model_len": 1024}
    return {
        "model": str(tiny),
        "served_name": "tiny",
        "adapters": {**adapters, "slots": slots, "wait_s": wait_s},
        "engine_args": {**args, "max_num_seqs": 32},
    }


@pytest.fixture(scope="module")
def folder(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("catalogue")
    shutil.copytree(tiny.parent / f"{tiny.name}-adapters", made / "in")
    return made


@pytest.fixture(scope="module")
def shapes(tiny: Path) -> dict[str, tuple[int, int]]:
    return {name: shape for name, shape in linear_shapes(tiny).items() if "_proj" in name}


@pytest.fixture(scope="module")
def chat(engines: ZygoteUnderTest, tiny: Path, folder: Path) -> Iterator[Child]:
    with served(engines, "many", VLLM, config(tiny, folder, slots=8, wait_s=30.0)) as child:
        yield child


def ask(child: Child, model: str, count: int = COUNT, prompt: list[int] = PROMPT) -> Any:
    body = {"model": model, "prompt": prompt, "max_tokens": count, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    return child.call("POST", "/v1/completions", body)


def tokens(child: Child, model: str, prompt: list[int] = PROMPT) -> list[int]:
    status, got = ask(child, model, prompt=prompt)
    assert status == 200, got
    found: list[int] = got["choices"][0]["token_ids"]
    return found


def tokens_at_once(child: Child, names: tuple[str, ...]) -> list[list[int]]:
    with ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(lambda name: tokens(child, name), names))


@pytest.mark.spec("F1", "F4", "F10")
def test_eight_adapters_and_the_base_run_in_one_step_and_answer_as_alone(
    engines: ZygoteUnderTest, tiny: Path, folder: Path, chat: Child
) -> None:
    names = ("tiny", *NAMES)
    alone = [tokens(chat, name) for name in names]
    assert len({tuple(found) for found in alone}) == len(names)
    beside = [opened(chat, name) for name in names]
    assert tokens_at_once(chat, names) == alone
    trace = chat.call("GET", "/adapters")[1]["trace"]
    assert trace["most_adapters_beside_base"] == 8
    assert 1 < trace["mean_adapters"] <= 8
    for conn in beside:
        conn.close()
    assert chat.call("POST", "/control/sleep")[0] == 200
    assert chat.call("POST", "/control/wake")[1]["verified"] is True
    assert tokens_at_once(chat, names) == alone
    wide = config(tiny, folder, slots=8, wait_s=30.0)
    wide["engine_args"] |= {"max_num_seqs": BATCH, "kv_cache_memory_bytes": 320 << 20}
    with served(engines, "again", VLLM, wide) as again:
        assert tokens_at_once(again, names) == alone
        fill(again, names)


def fill(child: Child, names: tuple[str, ...]) -> None:
    """Asks for more at once than a batch holds: a step has a whole batch, of all adapters."""

    def one(number: int) -> int:
        return int(ask(child, names[number % len(names)], count=160)[0])

    with ThreadPoolExecutor(BATCH + 40) as pool:
        assert set(pool.map(one, range(BATCH + 40))) == {200}
    trace = child.call("GET", "/adapters")[1]["trace"]
    assert (trace["most_requests"], trace["most_adapters_beside_base"]) == (BATCH, 8)


@pytest.mark.spec("F1")
def test_an_answer_names_the_adapter_as_it_was_asked_for(chat: Child) -> None:
    for name in ("a1", "tiny:a1", "tiny"):
        assert ask(chat, name, count=1)[1]["model"] == name


@pytest.mark.spec("F2")
def test_a_folder_dropped_into_place_is_served_replaced_and_gone_without_a_restart(
    chat: Child, folder: Path, shapes: dict[str, tuple[int, int]]
) -> None:
    assert ask(chat, "tiny:new")[0] == 404
    write(folder / "in" / "new", shapes, rank=8)
    first = tokens(chat, "tiny:new")
    write(folder / "in" / "new", shapes, rank=4)
    assert tokens(chat, "new") != first, "nothing of the old one is kept, its prefixes included"
    shutil.rmtree(folder / "in" / "new")
    assert ask(chat, "new")[0] == 404
    assert ask(chat, "a0")[0] == 200


@pytest.mark.spec("F2", "L3")
def test_a_bad_adapter_fails_its_own_request_with_the_reason_and_nothing_else(
    chat: Child, folder: Path, shapes: dict[str, tuple[int, int]]
) -> None:
    bad = {
        "corrupt": lambda made: (made / "adapter_model.safetensors").write_bytes(b"\xff" * 999),
        "half": lambda made: (made / "adapter_model.safetensors").unlink(),
        "wide": lambda made: write(made, shapes, rank=64),
        "strange": lambda made: write(made, {"model.layers.9.mlp.up_proj": (704, 256)}),
    }
    expected = tokens(chat, "a0")
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(ask, chat, "a2", 400)
        for name, spoil in bad.items():
            spoil(write(folder / "in" / name, shapes))
            status, got = ask(chat, name)
            assert (status, got["error"]["code"]) == (400, "adapter_invalid"), got
            assert name in got["error"]["message"]
        assert beside.result()[0] == 200
    assert tokens(chat, "a0") == expected


@pytest.mark.spec("F2", "L3")
def test_adapter_that_only_vllm_refuses_fails_only_its_own_request(
    chat: Child, folder: Path, shapes: dict[str, tuple[int, int]]
) -> None:
    """`add_lora` says so and `generate` never sees it; a stream hears it as a status too."""
    write(folder / "in" / "odd", shapes, rank_pattern={"q_proj": -1})
    body = {"model": "odd", "prompt": PROMPT, "max_tokens": 4}
    for stream in (False, True):
        status, got = chat.call("POST", "/v1/completions", {**body, "stream": stream})
        assert (status, got["error"]["code"]) == (400, "adapter_invalid"), got
        assert "vLLM" in got["error"]["message"]
    assert ask(chat, "a0")[0] == 200


@pytest.mark.spec("F8")
def test_new_adapter_waits_a_bounded_time_for_a_slot_and_is_then_refused(
    engines: ZygoteUnderTest, tiny: Path, folder: Path
) -> None:
    with served(engines, "few", VLLM, config(tiny, folder, slots=2, wait_s=0.5)) as child:
        streams = [opened(child, name) for name in ("a0", "a1")]
        status, got = ask(child, "a2", count=1)
        assert (status, got["error"]["code"]) == (503, "adapters_busy")
        assert "2 slots" in got["error"]["message"]
        assert ask(child, "tiny", count=1)[0] == 200 and ask(child, "a1", count=1)[0] == 200
        for conn in streams:
            conn.close()
        until(lambda: not child.call("GET", "/adapters")[1]["running"], 60)
        assert ask(child, "a2", count=1)[0] == 200


@pytest.mark.spec("F4", "F8")
def test_new_adapter_that_waits_gets_the_slot_that_falls_free_and_meanwhile_others_fill_the_batch(
    engines: ZygoteUnderTest, tiny: Path, folder: Path
) -> None:
    """With more adapters than slots: what fits the slots is chosen, though it came later. After a
    second one of the two that have slots gives way, and what is for the base fills the batch."""
    with (
        served(engines, "patient", VLLM, config(tiny, folder, slots=2, wait_s=60.0)) as child,
        ThreadPoolExecutor(40) as pool,
    ):
        first, second = [opened(child, name) for name in ("a0", "a1")]
        waiting = pool.submit(ask, child, "a2", 1)
        until(lambda: child.call("GET", "/adapters")[1]["waiting"], 60)
        later = [pool.submit(ask, child, name, 60) for name in ["tiny"] * 30 + ["a0", "a1"] * 2]
        until(lambda: child.call("GET", "/adapters")[1]["trace"]["most_requests"] == 32, 60)
        assert child.call("GET", "/adapters")[1]["trace"]["most_adapters"] == 2
        assert not waiting.done(), "no slot has fallen free"
        for conn in (first, second):
            conn.close()
        status, got = waiting.result(60)
        assert status == 200, got
        assert {asked.result()[0] for asked in later} == {200}


@pytest.mark.spec("F2")
def test_a_pinned_adapter_keeps_its_slot_until_its_entry_says_otherwise(
    engines: ZygoteUnderTest, tiny: Path, folder: Path
) -> None:
    extras = folder / "in" / "a0" / "serve.json"
    extras.write_text('{"pin": true}')
    with served(engines, "pins", VLLM, config(tiny, folder, slots=2, wait_s=0.5)) as child:
        expected = tokens(child, "a0")
        assert child.call("GET", "/adapters")[1]["pinned"] == ["tiny:a0"]
        stream = opened(child, "a1")
        assert ask(child, "a2", count=1)[0] == 503, "one slot is pinned, the other in use"
        assert ask(child, "a0", count=1)[0] == 200
        stream.close()
        until(lambda: not child.call("GET", "/adapters")[1]["running"], 60)
        for name in NAMES[1:]:  # each takes the slot of the one before
            assert ask(child, name, count=1)[0] == 200
        assert tokens(child, "a0") == expected
        extras.unlink()
        assert ask(child, "a3", count=1)[0] == 200
        assert child.call("GET", "/adapters")[1]["pinned"] == []
        streams = [opened(child, name) for name in ("a1", "a2")]
        for conn in streams:
            conn.close()


FLOOD_TOKENS = 48  # so that requests come faster than they are answered, on a busy machine too


@dataclass
class Flood:
    """One tenant's requests, far more than a batch has room for."""

    child: Child
    pool: ThreadPoolExecutor
    done: list[int] = field(default_factory=list)

    def start(self, count: int) -> list[Future[None]]:
        return [self.pool.submit(self._ask, n) for n in range(count)]

    def _ask(self, number: int) -> None:
        status, _ = asked_by(self.child, "flood", NAMES[1 + number % 7], tokens=FLOOD_TOKENS)
        assert status == 200
        self.done.append(number)


def asked_by(
    child: Child, tenant: str, model: str, *, tokens: int = 8, **more: str
) -> tuple[int, Any]:
    """As a replica asks: what it says of the caller is in headers."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
    headers = {messages.TENANT_HEADER: tenant, **more}
    return child.call("POST", "/v1/completions", {**body, "ignore_eos": True}, headers)


@pytest.mark.spec("F6")
@pytest.mark.parametrize(
    ("tenant", "adapter", "priority"),
    [
        ("single", "a1", Priority.NORMAL),
        ("flood", "a1", Priority.URGENT),
        ("flood", "a0", Priority.NORMAL),
    ],
    ids=["another tenant", "more urgent", "another adapter"],
)
def test_a_flood_delays_what_is_due_before_it_by_a_batch(
    chat: Child, tenant: str, adapter: str, priority: Priority
) -> None:
    """Told by the order of the answers: those of the batch that runs, then the single request in
    the next, although more than four batches of the flood came before it."""
    window = 32 + AHEAD
    with ThreadPoolExecutor(240) as pool:
        flood = Flood(chat, pool)
        asked = flood.start(240)
        until(lambda: chat.call("GET", "/admission")[1]["waiting"] > 4 * window, 60)
        before = len(flood.done)
        said = {messages.PRIORITY_HEADER: str(int(priority))}
        assert asked_by(chat, tenant, adapter, **said)[0] == 200
        between = len(flood.done) - before
        assert chat.call("GET", "/admission")[1]["waiting"] > 0
        # Two windows, and what other threads may have read before this one.
        assert between <= 3 * window, f"{between} answers of the flood came first"
        for one in asked:
            one.result()


@pytest.mark.spec("F6", "J8")
def test_request_beyond_what_the_gate_keeps_is_refused_and_those_of_a_client_that_left_are_not_run(
    chat: Child,
) -> None:
    def waiting() -> int:
        count: int = chat.call("GET", "/admission")[1]["waiting"]
        return count

    def flood(count: int) -> Connection:
        """So many requests in one call: one for each prompt."""
        body = {"model": "tiny", "prompt": [PROMPT] * count, "max_tokens": 900, "ignore_eos": True}
        line = Connection(chat.path)
        kind = {"content-type": "application/json"}
        line.request("POST", "/v1/completions", json.dumps(body), kind)
        return line

    half = MAX_WAITING // 2  # vLLM takes 1,024 prompts in a call
    floods = [flood(32 + AHEAD), flood(half), flood(half)]
    until(lambda: waiting() == MAX_WAITING, 60)
    status, got = ask(chat, "tiny", count=1)
    assert (status, got["error"]["code"]) == (429, "queue_full"), got
    assert str(MAX_WAITING) in got["error"]["message"]
    for line in floods:
        line.close()
    until(lambda: waiting() == 0, 60)
    assert ask(chat, "tiny", count=1)[0] == 200


@pytest.mark.spec("F6")
def test_a_request_past_its_deadline_is_refused_and_counted_before_any_step(chat: Child) -> None:
    assert ask(chat, "a0", count=1)[0] == 200
    before = chat.call("GET", "/adapters")[1]
    for model in ("tiny", "a0"):
        status, got = asked_by(chat, "t", model, **{messages.DEADLINE_HEADER: "-0.5"})
        assert (status, got["error"]["code"]) == (503, "deadline_unmet"), got
        body = {"model": model, "prompt": PROMPT, "max_tokens": 4, "stream": True}
        late = {messages.DEADLINE_HEADER: "0.0"}
        status, got = chat.call("POST", "/v1/completions", body, late)
        assert (status, got["error"]["code"]) == (503, "deadline_unmet"), got
    after = chat.call("GET", "/adapters")[1]
    assert after["trace"]["steps"] == before["trace"]["steps"]
    assert after["expired"] == before["expired"] + 4
    assert asked_by(chat, "t", "a0", **{messages.DEADLINE_HEADER: "60.0"})[0] == 200


@pytest.mark.spec("F6")
def test_request_whose_deadline_passes_while_it_waits_is_dropped_before_any_step(
    chat: Child, folder: Path, shapes: dict[str, tuple[int, int]]
) -> None:
    """It waits for one of eight slots, which are all in use, and could wait for 30 s."""
    write(folder / "in" / "ninth", shapes)
    streams = [opened(chat, name) for name in NAMES]
    expired = chat.call("GET", "/admission")[1]["expired"]
    late = {messages.DEADLINE_HEADER: "0.5"}
    with ThreadPoolExecutor(1) as pool:
        status, got = pool.submit(asked_by, chat, "late", "ninth", **late).result(60)
    assert (status, got["error"]["code"]) == (503, "deadline_unmet"), got
    # Counted from when the engine had it, which on a busy machine is some tenths after it was sent.
    assert re.search(r"0\.[0-5] s after it came", got["error"]["message"]), got
    facts = chat.call("GET", "/admission")[1]
    assert (facts["expired"], facts["waiting"], facts["running"]) == (expired + 1, 0, len(NAMES))
    assert tier(chat, "tiny:ninth") != "hot", "it has never been in a slot"
    for conn in streams:
        conn.close()
    assert asked_by(chat, "late", "ninth", **{messages.DEADLINE_HEADER: "60.0"})[0] == 200
    assert tier(chat, "tiny:ninth") == "hot"
    shutil.rmtree(folder / "in" / "ninth")


def tier(child: Child, adapter: str) -> str:
    """Empty: it has not been used."""
    top = child.call("GET", "/adapters")[1]["tiers"]["top"]
    return next((str(row["tier"]) for row in top if row["adapter"] == adapter), "")


def opened(child: Child, model: str) -> Connection:
    """A stream that has begun and goes on."""
    conn = Connection(child.path)
    body = {"model": model, "prompt": PROMPT, "max_tokens": 900, "stream": True, "ignore_eos": True}
    conn.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    assert conn.getresponse().read(20).startswith(b"data: ")
    return conn
