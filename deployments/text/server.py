"""Text: chat and completions, answered by vLLM's own serving classes in the engine child."""

from deployments.capability import Capability


class TextServer(Capability):
    """Passes raw JSON in and bytes out; vLLM in the engine child gives them their meaning."""

    paths = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
