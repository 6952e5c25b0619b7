"""Rerank, score and classify, and the vectors behind them: vLLM's pooling runner in its engine."""

from deployments.replica.capability import Capability


class RerankServer(Capability):
    paths = frozenset(
        "/v1/rerank /v2/rerank /rerank /v1/score /score /v1/classify /classify "
        "/v1/embeddings".split()
    )
