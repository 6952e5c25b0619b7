"""The example of an engine in one file, against a program that speaks llama-server's HTTP."""

import contextlib
import json
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_host import (
    ROOT,
    Child,
    Connection,
    ZygoteUnderTest,
    is_gone,
    until,
    zygote,
)

pytestmark = pytest.mark.spec("H9")
ENTRY = "deployments.engines.llama_server:build"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def light() -> Iterator[ZygoteUnderTest]:
    """Its PATH has the stand-in first."""
    path = f"{ROOT / 'tests' / 'support' / 'bin'}:{os.environ['PATH']}"
    with zygote("aiohttp", {"PATH": path}) as running:
        yield running


def spawned(light: ZygoteUnderTest, folder: Path, **told: Any) -> tuple[Child, Path]:
    model = folder / "model.gguf"
    model.write_text(json.dumps(told))
    ticket = f"llama-{uuid.uuid4().hex[:8]}"  # short: it is part of a socket's path
    config = {"model": str(model), "served_name": "llama", "engine_args": {"ctx_size": 512}}
    return light.spawn(ticket, ENTRY, config).hold(), model


def program_of(model: Path) -> int:
    return int(json.loads(model.with_suffix(".args").read_text())[-1])


def test_llama_server_loads_answers_streams_and_is_healthy(
    light: ZygoteUnderTest, tmp_path: Path
) -> None:
    child, model = spawned(light, tmp_path)
    assert child.ready()[0] == 200
    words = json.loads(model.with_suffix(".args").read_text())
    assert words[words.index("--ctx-size") + 1] == "512"
    status, said = child.call("POST", CHAT, {"model": "llama", "messages": []})
    assert (status, said["choices"][0]["message"]["content"]) == (200, "hi")
    assert said["model"] == "llama"
    assert child.call("GET", "/control/health") == (200, {"asleep": False})
    assert child.call("POST", "/slots/0?action=erase", {})[0] == 404
    assert child.call("POST", "/control/sleep")[0] == 409  # cannot, and so it leaves instead


@pytest.mark.spec("L4")
def test_program_answers_its_engine_process_alone(light: ZygoteUnderTest, tmp_path: Path) -> None:
    child, _ = spawned(light, tmp_path)
    child.ready()
    assert child.call("POST", CHAT, {"model": "llama", "messages": []})[0] == 200
    program = Child(child.pid, child.path.replace(".sock", ".l.sock"))
    assert program.call("POST", CHAT, {"model": "llama", "messages": []})[0] == 401


def test_a_client_that_leaves_ends_the_work_in_the_program(
    light: ZygoteUnderTest, tmp_path: Path
) -> None:
    child, model = spawned(light, tmp_path)
    child.ready()
    line = Connection(child.path)
    line.request("POST", CHAT, json.dumps({"stream": True}), {"content-type": "application/json"})
    assert line.getresponse().read(8) == b"data: {}"
    line.sock.close()
    line.close()
    until(model.with_suffix(".left").exists, 60)
    assert child.call("GET", "/control/health")[0] == 200


def test_llama_server_program_and_its_engine_process_end_together(
    light: ZygoteUnderTest, tmp_path: Path
) -> None:
    child, model = spawned(light, tmp_path)
    child.ready()
    os.kill(program_of(model), signal.SIGKILL)
    until(lambda: is_gone(child.pid), 60)
    (tmp_path / "b").mkdir()
    child, model = spawned(light, tmp_path / "b")
    child.ready()
    program = program_of(model)
    child.let_go()  # as its replica's end does
    until(lambda: is_gone(child.pid) and is_gone(program), 60)


def test_hanging_program_is_killed_with_its_engine_and_a_second_kill_is_harmless(
    light: ZygoteUnderTest, tmp_path: Path
) -> None:
    child, model = spawned(light, tmp_path, hang=True)
    until(model.with_suffix(".args").exists, 60)
    program = program_of(model)
    status, said = child.call("GET", "/control/health")
    assert (status, said["error"]["type"]) == (503, "NotAwake")
    for _ in range(2):  # as the node agent does when the load takes too long
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        until(lambda: is_gone(child.pid) and is_gone(program), 60)


def test_a_program_that_ends_while_it_loads_is_the_cause(
    light: ZygoteUnderTest, tmp_path: Path
) -> None:
    child, _ = spawned(light, tmp_path, status=3)
    status, said = child.ready()
    assert status == 500
    assert "ended with 3" in said["error"]["message"]
