"""Reranking with the shipped configuration: loaded for the first request, by the cosine of real
vectors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.graph.conftest import LABELLED, LABELS, Graph
from tests.support.pooling_models import logits

MODEL, EMBED = "minilm-reranker", "all-minilm-l6-v2"
QUERY = "How do I free the memory of my graphics card?"
FITTING, FOREIGN = "Unload the model to release GPU memory.", "Paris is the capital of France."
JINA = {"model": MODEL, "query": QUERY, "documents": [FOREIGN, FITTING]}


def said(graph: Graph, path: str, body: object) -> Any:
    status, answer = graph.post(path, body)
    assert status == 200, answer
    return answer


@pytest.mark.spec("H7", "J1")
def test_documents_are_ranked_for_a_query_in_each_clients_form(graph: Graph) -> None:
    answer = said(graph, "/v1/rerank", JINA)
    assert answer["model"] == MODEL
    [first, second] = answer["results"]
    assert (first["index"], second["index"]) == (1, 0)
    assert first["document"]["text"] == FITTING
    assert first["relevance_score"] > 0.5 > second["relevance_score"]
    [only] = said(graph, "/v2/rerank", JINA | {"top_n": 1, "return_documents": False})["results"]
    assert only == {"index": 1, "relevance_score": pytest.approx(first["relevance_score"])}
    # Its clients name no model, which does where only one serves the path; here two do.
    tei = {"model": MODEL, "query": QUERY, "texts": [FOREIGN, FITTING], "truncate": False}
    rows = said(graph, "/rerank", tei)
    assert rows[0] == {"index": 1, "score": pytest.approx(first["relevance_score"])}
    pair = {"model": MODEL, "text_1": QUERY, "text_2": FITTING, "x_priority": "low"}
    [score] = said(graph, "/v1/score", pair)["data"]
    assert score["score"] == pytest.approx(first["relevance_score"], abs=1e-4)


@pytest.mark.spec("H7", "J1")
def test_texts_are_classified_with_the_probabilities_of_transformers(graph: Graph) -> None:
    texts = [QUERY, FITTING, FOREIGN]
    folder = Path(graph.table["capabilities"]["rerank"]["models"][LABELLED]["source"])
    wanted = torch.softmax(logits(folder, texts), dim=-1)
    for path in ("/v1/classify", "/classify"):
        rows = said(graph, path, {"model": LABELLED, "input": texts})["data"]
        for row, probabilities in zip(rows, wanted, strict=True):
            assert row["probs"] == pytest.approx(probabilities.tolist(), abs=1e-3)
            assert row["label"] == LABELS[int(probabilities.argmax())]


@pytest.mark.spec("H1", "H7")
def test_pooling_by_vllm_gives_the_vectors_of_the_embedding_engine_and_ranks_by_them(
    graph: Graph,
) -> None:
    texts = [QUERY, FITTING, FOREIGN]
    pooled, plain = (
        np.array([row["embedding"] for row in said(graph, "/v1/embeddings", asked)["data"]])
        for asked in ({"model": name, "input": texts} for name in (MODEL, EMBED))
    )
    np.testing.assert_allclose(pooled, plain, atol=1e-4)
    rows = said(graph, "/v1/rerank", JINA | {"documents": texts[1:]})["results"]
    scores = {row["index"]: row["relevance_score"] for row in rows}
    np.testing.assert_allclose([scores[0], scores[1]], plain[1:] @ plain[0], atol=1e-4)


@pytest.mark.spec("H7", "L3")
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/rerank", {"model": MODEL, "documents": ["x"]}, "query"),
        ("/v1/rerank", {"model": MODEL, "query": "x"}, "documents"),
        ("/rerank", {"model": MODEL, "query": "x", "texts": []}, "texts"),
        ("/v1/rerank", JINA | {"top_n": 0}, "top_n"),
        ("/score", {"model": MODEL, "text_1": "x"}, "text_2"),
        ("/v1/score", {"model": MODEL, "text_1": ["x"] * 2, "text_2": ["y"] * 3}, "text_2"),
        ("/classify", {"model": MODEL, "input": []}, "input"),
        ("/v1/classify", {"model": MODEL, "input": "x"}, "model"),
    ],
)
def test_bad_rerank_is_400_and_says_what_is_wrong(
    graph: Graph, path: str, body: object, field: str
) -> None:
    status, answer = graph.post(path, body)
    assert status == 400, answer
    assert answer["error"]["param"] == field


@pytest.mark.spec("H7", "L3")
def test_document_longer_than_the_model_takes_is_400_and_says_how_much_it_takes(
    graph: Graph,
) -> None:
    status, answer = graph.post("/v1/rerank", JINA | {"documents": ["memory " * 600]})
    assert status == 400 and "256" in answer["error"]["message"]


@pytest.mark.spec("H7", "L3")
def test_rerank_of_an_embedding_model_is_404_and_names_its_path(graph: Graph) -> None:
    status, answer = graph.post("/v1/rerank", JINA | {"model": EMBED})
    assert (status, answer["error"]["param"]) == (404, "model")
    assert "/v1/embeddings" in answer["error"]["message"]
