"""Vision: chat about pictures, by vLLM's multimodal models in its engine.

The front lets only pictures within bounds pass (deployments.front.inference.pictures); the engine
gives each an identity of its own (deployments.engines.vllm.pictures.picture_identity).
"""

from deployments.replica.capability import Capability


class VisionServer(Capability):
    paths = frozenset({"/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"})
