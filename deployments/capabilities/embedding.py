"""The embedding capability: text in, vectors out, by sentence-transformers in its engine."""

from deployments.replica.capability import Capability


class EmbeddingServer(Capability):
    paths = frozenset({"/v1/embeddings"})
