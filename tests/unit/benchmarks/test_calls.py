"""One request for each capability."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartParser
from starlette.requests import Request

from benchmarks import bare
from benchmarks.calls import Call, calls, models_of
from deployments.capabilities.asr import TranscriptionServer
from deployments.capabilities.embedding import EmbeddingServer
from deployments.capabilities.image import ImageServer
from deployments.capabilities.rerank import RerankServer
from deployments.capabilities.text import TextServer
from deployments.capabilities.tts import SpeechServer
from deployments.capabilities.vad import VadServer
from deployments.capabilities.vision import VisionServer
from deployments.config.config_file import check_file
from deployments.config.schema import Table

SERVED = Path(__file__).parents[3] / "serve_config.yaml"
HEARD = b"a file of speech"


def shipped() -> dict[str, Any]:
    config = yaml.safe_load(SERVED.read_text())
    found: dict[str, Any] = config["applications"][0]["deployments"][0]["user_config"]
    return found


@pytest.fixture(scope="module")
def table() -> Table:
    return check_file(SERVED)


async def fields_of(body: bytes, kind: str) -> dict[str, str | bytes]:
    """A form, as starlette reads it."""

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", kind.encode())]
    request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    form = await MultiPartParser(request.headers, request.stream()).parse()
    try:
        return {
            name: await value.read() if isinstance(value, UploadFile) else value
            for name, value in form.items()
        }
    finally:
        await form.close()


def test_every_capability_that_is_shipped_has_a_request_and_a_library(table: Table) -> None:
    assert calls(HEARD).keys() == table.capabilities.keys() == bare.LIBRARIES.keys()
    assert len(table.capabilities) == 8


@pytest.mark.parametrize(
    ("capability", "server"),
    [
        ("chat", TextServer),
        ("embedding", EmbeddingServer),
        ("rerank", RerankServer),
        ("vision", VisionServer),
        ("asr", TranscriptionServer),
        ("tts", SpeechServer),
        ("vad", VadServer),
        ("image", ImageServer),
    ],
)
def test_request_goes_to_a_path_of_its_capability(capability: str, server: type[Any]) -> None:
    assert calls(HEARD)[capability].path in server.paths


def test_json_has_the_model_and_the_fields() -> None:
    body, kind = calls(HEARD)["rerank"].body("a-model")
    said = {"model": "a-model", "query": "memory", "documents": ["RAM", "a cat"]}
    assert (json.loads(body), kind) == (said, "application/json")


async def test_request_with_a_file_is_a_form() -> None:
    found = await fields_of(*calls(HEARD)["asr"].body("a-model"))
    assert found == {"file": HEARD, "model": "a-model", "language": "en"}


def test_streamed_request_has_its_own_count_of_tokens_and_leaves_the_other_alone() -> None:
    call = Call("/v1/chat/completions", {"max_tokens": 8, "temperature": 0})
    assert call.streamed(24).fields == {"max_tokens": 24, "temperature": 0, "stream": True}
    assert call.fields["max_tokens"] == 8


def test_first_model_of_each_capability_is_asked() -> None:
    table = {"capabilities": {"chat": {"models": {"b": {}, "a": {}}}, "asr": {"models": {"c": {}}}}}
    assert models_of(table) == {"chat": "b", "asr": "c"}
    assert models_of(shipped())["asr"] == "tiny.en"


def test_library_gets_the_folder_the_fields_and_the_file(tmp_path: Path) -> None:
    task = bare.task_of(shipped(), "asr", calls(HEARD)["asr"], tmp_path)
    assert (Path(task.model) / "model.bin").is_file()
    assert task.fields == {"language": "en"}
    assert task.file is not None and Path(task.file).read_bytes() == HEARD


def test_library_that_fails_is_said_with_its_last_words() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)asr, status 1: .*no-such-folder"):
        bare.measured(bare.Task("asr", "/no-such-folder", {}, {"language": "en"}, "x.wav"))
