"""Pictures of a killed vLLM engine, found by the next one: the same tokens without the encoder.

In float32, so that tokens can be compared. The test process holds the slab, as an agent would.
"""

import contextlib
import json
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from arbiter.pool import SlabView
from arbiter.pool.layout import tenant_digest
from arbiter.units import MIB, Bytes, Content
from models.train_vision import QUESTIONS
from tests.support.drawings import drawing, uri
from tests.support.engine_host import (
    Child,
    Connection,
    ZygoteUnderTest,
    killed,
    served,
)
from tests.support.slabs import lent_slab, path_of

VLLM = "deployments.engines.vllm.engine:build"
PICTURES = [uri(drawing(number)) for number in (0, 60, 150)]


@pytest.fixture
def slab() -> Iterator[int]:
    with lent_slab(128 * MIB) as fd:
        yield fd


def set_limit(fd: int, limit: Bytes) -> None:
    with contextlib.closing(SlabView(fd)) as view:
        view.limit_bytes = limit


def config(model: Path, slab: int) -> dict[str, Any]:
    args = {
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 32 * MIB,
        "limit_mm_per_prompt": {"image": 3},
    }
    slabs = {"picture": {"path": path_of(slab)}}
    return {"model": str(model), "served_name": "eyes", "engine_args": args, "slabs": slabs}


def ask(child: Child, *urls: str, tenant: str = "acme", most: int = 14) -> tuple[int, Any]:
    """As a replica sends it: the tenant is in a header and in the salt."""
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    parts.append({"type": "text", "text": QUESTIONS["describe"][0]})
    body = {
        "messages": [{"role": "user", "content": parts}],
        "temperature": 0,
        "max_tokens": most,
        "logprobs": True,
        "cache_salt": tenant,
    }
    headers = {"content-type": "application/json", "x-arbiter-tenant": tenant}
    with contextlib.closing(Connection(child.path)) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def told(child: Child, *urls: str, tenant: str = "acme") -> list[tuple[str, float]]:
    """Its tokens with their log-probabilities."""
    status, said = ask(child, *urls, tenant=tenant)
    assert status == 200, said
    content = said["choices"][0]["logprobs"]["content"]
    return [(each["token"], round(each["logprob"], 4)) for each in content]


def facts(child: Child, method: str = "GET") -> dict[str, int]:
    status, said = child.call(method, "/pictures")
    assert status == 200, said
    return dict(said)


@pytest.fixture
def cold(engines: ZygoteUnderTest, describer: Path, slab: int) -> list[list[tuple[str, float]]]:
    """What an engine said of each picture, and of all at once, before it was killed."""
    with killed(engines, "first", VLLM, config(describer, slab)) as child:
        said = [told(child, url) for url in PICTURES] + [told(child, *PICTURES)]
        counted = facts(child)
        assert (counted["encoder_runs"], counted["hits"]) == (len(PICTURES), len(PICTURES))
    return said


@pytest.mark.spec("H8", "E1", "E10")
def test_next_engine_answers_known_pictures_without_its_encoder(
    engines: ZygoteUnderTest, describer: Path, slab: int, cold: list[list[tuple[str, float]]]
) -> None:
    with contextlib.closing(SlabView(slab)) as view:
        assert (view.content, view.ready_count) == (Content.PICTURE, len(PICTURES))
        assert {mark.tenant for _, mark in view.marks()} == {tenant_digest("acme")}
    with served(engines, "second", VLLM, config(describer, slab)) as child:
        assert [told(child, url) for url in PICTURES] + [told(child, *PICTURES)] == cold
        assert facts(child)["encoder_runs"] == 0
        assert facts(child)["hits"] == 3 * len(PICTURES)
        # Another tenant's equal pixels are another picture.
        assert told(child, PICTURES[0], tenant="other") == cold[0]
        assert facts(child)["encoder_runs"] == 1
        # A slab of the pool outlives a sleep too.
        assert child.call("POST", "/control/sleep")[0] == 200
        assert child.call("POST", "/control/wake")[1]["verified"] is True
        assert told(child, *PICTURES) == cold[-1]
        assert facts(child)["encoder_runs"] == 1
        gives_memory_back(child, slab, cold)
        refuses_embeddings(child)


def gives_memory_back(child: Child, slab: int, cold: list[list[tuple[str, float]]]) -> None:
    """A purge does, and so does a lower limit."""
    assert child.call("POST", "/control/purge") == (200, {"purges": True})
    assert (facts(child)["entries"], os.fstat(slab).st_blocks * 512 < 2 * MIB) == (0, True)
    assert told(child, PICTURES[0]) == cold[0]
    assert (facts(child)["entries"], facts(child)["encoder_runs"]) == (1, 2)
    set_limit(slab, Bytes(0))
    status, said = child.call("POST", "/slab")
    assert (status, said["picture"]["entries"]) == (200, 0)
    assert told(child, PICTURES[0]) == cold[0]
    assert facts(child)["encoder_runs"] == 3


def refuses_embeddings(child: Child) -> None:
    """A connector alone would have vLLM accept them from clients."""
    part = {"type": "image_embeds", "image_embeds": "AAAA"}
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
    status, said = child.call("POST", "/v1/chat/completions", body)
    assert (status, "--enable-mm-embeds" in json.dumps(said)) == (400, True), said


@pytest.mark.spec("H8", "E5")
def test_damaged_slab_costs_runs_of_the_encoder_and_no_error(
    engines: ZygoteUnderTest, describer: Path, slab: int, cold: list[list[tuple[str, float]]]
) -> None:
    with contextlib.closing(mmap.mmap(slab, os.fstat(slab).st_size)) as memory:
        memory[4096 : 4096 + 2 * 128] = b"\xa5" * (2 * 128)
    with served(engines, "damaged", VLLM, config(describer, slab)) as child:
        assert [told(child, url) for url in PICTURES] == cold[:-1]
        assert facts(child)["encoder_runs"] == 2
        assert told(child, *PICTURES) == cold[-1]
        assert facts(child)["encoder_runs"] == 2
