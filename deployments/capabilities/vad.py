"""Voice activity detection: sound in, spans of speech out."""

from deployments.replica.capability import Capability


class VadServer(Capability):
    paths = frozenset({"/v1/audio/vad"})
