"""Text: chat and completions, answered by vLLM's own serving classes in its engine."""

from deployments.replica.adapted_capability import AdaptedCapability


class TextServer(AdaptedCapability):
    """Passes raw JSON in and bytes out; vLLM in the engine gives them their meaning."""

    paths = frozenset(
        "/v1/chat/completions /v1/completions /v1/responses /v1/messages "
        "/v1/messages/count_tokens".split()
    )
