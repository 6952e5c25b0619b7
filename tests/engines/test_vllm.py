"""vLLM in a child: its own OpenAI semantics, a real sleep, an honest death."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from arbiter.node import procfs
from deployments import messages
from tests.support.engine_host import (
    Child,
    Connection,
    ZygoteUnderTest,
    device_bytes,
    disk_reads,
    forget_weights,
    host_bytes,
    is_gone,
    kill,
    served,
    tree,
    until,
)
from tests.support.open_files import open_files
from tests.support.speech import transcribe, wav

VLLM = "deployments.engines.vllm.engine:build"
MIB = 1 << 20
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "What is a lease?"}]}
GREEDY = {**CHAT, "max_tokens": 12, "temperature": 0}
OTHER_USER = 65_534  # without rights, and on each machine
# What the socket's owner sends a process of that user which sends nothing.
GREETED = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
with socket.socket(socket.AF_UNIX) as asking:
    asking.connect(sys.argv[2])
    asking.settimeout(60)
    print(len(asking.recv(64)))
"""


def config(model: Path, **more: Any) -> dict[str, Any]:
    adapters = {f"a{i}": str(model.parent / f"{model.name}-adapters" / f"a{i}") for i in range(4)}
    args = {
        "dtype": "float32",
        "kv_cache_memory_bytes": 64 * MIB,
        "max_model_len": 1024,
        "enable_lora": True,
        "max_loras": 4,
        "max_lora_rank": 16,
        "lora_modules": adapters,
    }
    return {"model": str(model), "served_name": "tiny", "engine_args": {**args, **more}}


@pytest.fixture(scope="module")
def chat(engines: ZygoteUnderTest, tiny: Path) -> Iterator[Child]:
    with served(engines, "chat", VLLM, config(tiny)) as child:
        yield child


def answer(child: Child, model: str = "tiny") -> Any:
    body = {**GREEDY, "model": model, "logprobs": True, "top_logprobs": 3}
    status, got = child.call("POST", "/v1/chat/completions", body)
    assert status == 200, got
    return got["choices"]


def stream(child: Child, body: dict[str, Any]) -> list[str]:
    raw = child.call("POST", "/v1/chat/completions", {**body, "stream": True})[1]
    return [line[6:] for line in raw.decode().splitlines() if line.startswith("data: ")]


@pytest.mark.spec("F1", "J1")
def test_a_chat_is_answered_in_openais_shape(chat: Child) -> None:
    status, body = chat.call("POST", "/v1/chat/completions", GREEDY)
    assert status == 200
    assert body["object"] == "chat.completion" and body["model"] == "tiny"
    assert body["usage"]["completion_tokens"] == 12


@pytest.mark.spec("F6")
def test_a_model_without_admitted_adapters_also_drops_what_is_past_its_deadline(
    chat: Child,
) -> None:
    expired = chat.call("GET", "/admission")[1]["expired"]
    for more in ({}, {"stream": True}):
        late = {messages.DEADLINE_HEADER: "0.0", messages.TENANT_HEADER: "t"}
        status, got = chat.call("POST", "/v1/chat/completions", {**GREEDY, **more}, late)
        assert (status, got["error"]["code"]) == (503, "deadline_unmet"), got
    facts = chat.call("GET", "/admission")[1]
    assert facts["expired"] == expired + 2
    assert facts["running"] == facts["waiting"] == 0
    assert "t" not in facts["served"]


@pytest.mark.spec("F6")
def test_answer_costs_its_tenant_each_token_whether_streamed_or_not(chat: Child) -> None:
    prompt = chat.call("POST", "/v1/chat/completions", GREEDY)[1]["usage"]["prompt_tokens"]
    for more in ({}, {"stream": True}):
        before = chat.call("GET", "/admission")[1]["served"][""]
        assert chat.call("POST", "/v1/chat/completions", {**GREEDY, **more})[0] == 200
        after = chat.call("GET", "/admission")[1]["served"][""]
        assert after - before == prompt + 2 * 12


@pytest.mark.spec("J1")
def test_a_stream_says_the_same_as_a_whole_answer(chat: Child) -> None:
    *events, last = stream(chat, GREEDY)
    assert last == "[DONE]" and len(events) > 2
    parts = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events]
    whole = chat.call("POST", "/v1/chat/completions", GREEDY)[1]
    assert "".join(parts) == whole["choices"][0]["message"]["content"]


@pytest.mark.spec("F6", "J8")
def test_answer_that_its_client_does_not_read_keeps_no_place_in_the_batch(chat: Child) -> None:
    """Its eight texts are more than sockets and buffers on the way hold."""
    body = {**CHAT, "n": 8, "max_tokens": 600, "ignore_eos": True, "stream": True}
    conn = Connection(chat.path)
    headers = {"content-type": "application/json"}
    conn.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    unread = conn.getresponse()  # its head, and no more
    until(lambda: chat.call("GET", "/admission")[1]["running"] == 0, 60)
    assert unread.read().endswith(b"data: [DONE]\n\n"), "all of it is there for a late reader"
    conn.close()


@pytest.mark.spec("L3")
@pytest.mark.parametrize(
    ("change", "status"),
    [({"model": "nobody"}, 404), ({"temperature": -3}, 400), ({"messages": "hello"}, 400)],
)
def test_bad_request_is_a_4xx_and_harms_no_other_request(
    chat: Child, change: dict[str, Any], status: int
) -> None:
    got, body = chat.call("POST", "/v1/chat/completions", {**GREEDY, **change})
    assert got == status and body["error"]["message"]
    assert chat.call("POST", "/v1/chat/completions", GREEDY)[0] == 200


@pytest.mark.spec("L1")
@pytest.mark.parametrize(
    "path",
    "/sleep /wake_up /collective_rpc /reset_prefix_cache /v1/load_lora_adapter /pause /invocations"
    " /scale_elastic_ep /start_profile /update_weights /openapi.json /docs".split(),
)
def test_routes_that_command_the_engine_are_out_of_reach(chat: Child, path: str) -> None:
    assert chat.call("POST", path, {})[0] == 404


@pytest.mark.spec("L3")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "schema", [{"$ref": "#"}, {"type": "string", "minLength": -4}], ids=["no text", "no grammar"]
)
def test_schema_that_no_text_can_follow_is_400_and_harms_no_other_request(
    chat: Child, schema: dict[str, Any], stream: bool
) -> None:
    """Both pass vLLM's own checks."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = GREEDY | {"response_format": form, "stream": stream}
    status, said = chat.call("POST", "/v1/chat/completions", body)
    assert (status, said["error"]["param"]) == (400, "response_format")
    assert chat.call("POST", "/v1/chat/completions", GREEDY)[0] == 200


@pytest.mark.spec("J1", "L3")
def test_model_that_hears_nothing_refuses_sound(chat: Child) -> None:
    answer = transcribe(chat, wav(np.zeros(16_000, np.float32), 16_000))
    assert (answer.status, answer.json()["error"]["param"]) == (400, "model")


@pytest.mark.spec("D1", "D6")
def test_a_wake_reads_no_disk_and_changes_no_bit(chat: Child, tiny: Path) -> None:
    names = ("tiny", "a0", "a3")
    before = [answer(chat, name) for name in names]
    for _ in range(2):
        assert chat.call("POST", "/control/sleep")[0] == 200
        assert host_bytes(chat.pid) > 7 * MIB  # the checkpoint
        assert forget_weights(tiny) > 7 * MIB
        reads = disk_reads(chat.pid)
        woken = chat.call("POST", "/control/wake")[1]
        assert woken["verified"] is True
        disk, called = (now - then for now, then in zip(disk_reads(chat.pid), reads, strict=True))
        assert disk == 0
        assert called < MIB, "the checkpoint is 7 MB: it was mapped, not read"
        assert host_bytes(chat.pid) == 0
        assert [answer(chat, name) for name in names] == before


@pytest.mark.spec("D6")
def test_a_wake_from_a_damaged_host_copy_is_noticed_and_loads_from_disk(chat: Child) -> None:
    before = [answer(chat, name) for name in ("tiny", "a0")]
    assert chat.call("POST", "/control/sleep")[0] == 200
    damage_host_copy(chat)
    assert chat.call("POST", "/control/wake")[1]["verified"] is False
    assert [answer(chat, name) for name in ("tiny", "a0")] == before
    assert chat.call("POST", "/control/sleep")[0] == 200
    assert chat.call("POST", "/control/wake")[1]["verified"] is True


def damage_host_copy(child: Child) -> None:
    """Zeros in the middle half of what sleeps: weights of most layers, still a proper file."""
    targets = (item for pid in tree(child.pid) for item in open_files(pid).items())
    (copy,) = [fd for fd, target in targets if "memfd:host-copy" in target]
    with copy.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(size // 4)
        file.write(bytes(size // 2))


def test_requests_are_refused_while_asleep_not_lost(chat: Child) -> None:
    assert chat.call("POST", "/control/sleep")[0] == 200
    assert chat.call("POST", "/v1/chat/completions", GREEDY)[0] == 503
    assert chat.call("GET", "/control/health")[1]["asleep"]
    assert chat.call("POST", "/control/wake")[0] == 200
    assert chat.call("POST", "/v1/chat/completions", GREEDY)[0] == 200


def test_sockets_between_frontend_and_core_open_to_their_owner_only(chat: Child) -> None:
    folder = Path(chat.path).parent
    assert (folder / "chat.in").is_socket() and (folder / "chat.out").is_socket()
    assert folder.stat().st_mode & 0o077 == 0


@pytest.mark.spec("D1")
def test_sleep_after_many_concurrent_requests_gives_back_nine_tenths(
    engines: ZygoteUnderTest, medium: Path
) -> None:
    more = {"dtype": "bfloat16", "kv_cache_memory_bytes": 1536 * MIB}
    with served(engines, "medium", VLLM, config(medium, **more)) as child:
        with ThreadPoolExecutor(24) as pool:  # batches of every size leave their traces in the heap
            asks = [("tiny", "a0", "a1")[n % 3] for n in range(48)]
            assert len(list(pool.map(lambda name: answer(child, name), asks))) == len(asks)
        before = answer(child, "a1")
        # The cache gets its pages behind everything else. Half of the file: weights of bfloat16.
        weights = (medium / "model.safetensors").stat().st_size // 2
        until(lambda: device_bytes(child.pid) > 1536 * MIB + weights, 60)
        awake = device_bytes(child.pid)
        assert child.call("POST", "/control/sleep")[0] == 200
        assert awake - device_bytes(child.pid) >= 0.9 * awake
        assert child.call("POST", "/control/wake")[1]["verified"] is True
        assert answer(child, "a1") == before


@pytest.mark.spec("D1", "D6")
def test_files_that_the_index_leaves_out_are_neither_kept_asleep_nor_read_by_a_wake(
    engines: ZygoteUnderTest, tiny: Path, tmp_path: Path
) -> None:
    """Some models of the hub have their weights a second time, in another form."""
    shutil.copytree(tiny, model := tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "model.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    other = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    save_file(other, model / "other.safetensors")
    given = config(model, enable_lora=False, lora_modules={})
    with served(engines, "listed", VLLM, given) as child:
        before = answer(child)
        assert child.call("POST", "/control/sleep")[0] == 200
        status, woken = child.call("POST", "/control/wake")
        assert (status, woken["verified"]) == (200, True)
        assert answer(child) == before


@pytest.mark.spec("D5")
def test_a_model_replaced_on_disk_is_never_put_to_sleep_as_the_old_one(
    engines: ZygoteUnderTest, tiny: Path, tmp_path: Path
) -> None:
    copied = Path(shutil.copytree(tiny, tmp_path / "model"))
    child = engines.spawn("replaced", VLLM, config(copied, enable_lora=False, lora_modules={}))
    assert child.hold().ready()[0] == 200
    os.utime(copied / "model.safetensors")
    status, body = child.call("POST", "/control/sleep")
    assert status == 500 and "changed on disk" in body["error"]["message"]
    until(lambda: is_gone(child.pid), 60)


@pytest.mark.spec("A19", "H9")
def test_killed_core_ends_the_stream_with_an_error_and_leaves_no_process(
    engines: ZygoteUnderTest, tiny: Path
) -> None:
    child = engines.spawn("killed", VLLM, config(tiny)).hold()
    assert child.ready()[0] == 200
    processes = tree(child.pid)
    _, core = processes
    conn = Connection(child.path)
    body = {**CHAT, "stream": True, "max_tokens": 900, "ignore_eos": True}
    conn.request("POST", "/v1/chat/completions", json.dumps(body), JSON)
    response = conn.getresponse()
    assert response.read(20).startswith(b"data: ")
    os.kill(core, signal.SIGKILL)
    rest = response.read()
    assert b"error" in rest and b"[DONE]" in rest
    until(lambda: all(is_gone(pid) for pid in processes), 60)


JSON = {"content-type": "application/json"}


@pytest.mark.spec("H9")
def test_core_that_hangs_over_a_request_makes_its_engine_unhealthy_until_it_goes_on(
    engines: ZygoteUnderTest, tiny: Path
) -> None:
    entry = "tests.support.impatient_vllm:build"
    with served(engines, "hangs", entry, config(tiny)) as child, ThreadPoolExecutor(1) as client:

        def health() -> Any:
            return child.call("GET", "/control/health")

        _, core = tree(child.pid)
        os.kill(core, signal.SIGSTOP)
        try:
            asking = client.submit(answer, child)
            until(lambda: health()[0] == 503, 60)
            assert "engine core has not gone on" in health()[1]["error"]["message"]
        finally:
            os.kill(core, signal.SIGCONT)
        assert asking.result(60)
        until(lambda: health()[0] == 200, 60)


@pytest.mark.spec("A19")
def test_a_killed_frontend_takes_its_core_along(engines: ZygoteUnderTest, tiny: Path) -> None:
    child = engines.spawn("headless", VLLM, config(tiny)).hold()
    assert child.ready()[0] == 200
    _, core = tree(child.pid)
    os.kill(child.pid, signal.SIGKILL)
    until(lambda: is_gone(core), 60)


@pytest.mark.spec("A19")
def test_model_of_two_processes_answers_as_one_and_leaves_nothing_when_its_frontend_is_killed(
    engines: ZygoteUnderTest, tiny: Path, chat: Child
) -> None:
    """Half of its KV cache is in each, both are on its account, and it does not sleep: each would
    have a copy of all weights."""
    child = engines.spawn("two", VLLM, config(tiny, tensor_parallel_size=2)).hold()
    try:
        status, said = child.ready()
        assert (status, said["can_sleep"]) == (200, False), (said, child.log[-2000:])
        assert answer(child)[0]["message"] == answer(chat)[0]["message"]
        members = tree(child.pid)
        workers = [p for p in members if procfs.name(p).startswith("VLLM::Worker")]
        assert len(workers) == 2

        def is_counted() -> bool:
            rest = [p for p in members if p not in workers]
            more = procfs.memory(members).device_bytes - procfs.memory(rest).device_bytes
            return more >= 64 * MIB

        until(is_counted, 60)
        maps = "".join(Path(f"/proc/{p}/maps").read_text() for p in workers)
        shared = [line for line in maps.splitlines() if "/dev/shm/" in line]
        assert shared and all(line.endswith("(deleted)") for line in shared)
        places = listening(members)
        assert len(places) > 4 and {place.parent for place in places} == {Path(child.path).parent}
        os.kill(child.pid, signal.SIGKILL)
        until(lambda: all(is_gone(p) for p in members), 60)
    finally:
        kill(child)


def listening(pids: list[int]) -> set[Path]:
    """Where these processes take connections by unix sockets."""
    targets = (target for pid in pids for target in open_files(pid).values())
    inodes = {target.removeprefix("socket:[").removesuffix("]") for target in targets}
    rows = (row.split() for row in Path("/proc/net/unix").read_text().splitlines()[1:])
    return {Path(row[7]) for row in rows if row[3] == "00010000" and row[6] in inodes}


@pytest.mark.spec("L4")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_frontend_hangs_up_on_another_user_that_can_reach_the_sockets_of_its_core(
    chat: Child,
) -> None:
    sockets = listening(tree(chat.pid)) - {Path(chat.path)}
    assert {place.suffix for place in sockets} == {".in", ".out"}
    folder = Path(chat.path).parent
    try:
        folder.chmod(0o711)
        for place in sockets:
            place.chmod(0o777)
            assert greeted(os.getuid(), place) > 0
            assert greeted(OTHER_USER, place) == 0
    finally:
        folder.chmod(0o700)


def greeted(uid: int, place: Path) -> int:
    """How many bytes a process of that user is sent."""
    command = [sys.executable, "-c", GREETED, str(uid), place.name]
    said = subprocess.run(command, cwd=place.parent, capture_output=True, text=True, check=True)
    return int(said.stdout)


@pytest.mark.spec("A12")
@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"max_model_len": 10**9}, "max_model_len"),
        ({"no_such_argument": 1}, "no-such-argument"),
        ({"kv_cache_memory_bytes": MIB}, "KV cache"),
        ({"lora_modules": {"x": "/nowhere"}}, "/nowhere"),
    ],
)
def test_a_load_that_fails_names_its_cause_and_ends(
    engines: ZygoteUnderTest, tiny: Path, change: dict[str, Any], word: str
) -> None:
    child = engines.spawn(f"bad-{next(iter(change))}", VLLM, config(tiny, **change)).hold()
    status, body = child.ready()
    assert status == 500
    assert word.lower() in body["error"]["message"].lower()
    until(lambda: is_gone(child.pid), 60)


def test_a_model_without_kv_bytes_is_refused(engines: ZygoteUnderTest, tiny: Path) -> None:
    child = engines.spawn("no-kv", VLLM, {"model": str(tiny), "engine_args": {}}).hold()
    assert "kv_cache_memory_bytes" in child.ready()[1]["error"]["message"]
