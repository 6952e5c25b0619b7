"""Speech: text in, sound out, clause by clause."""

from deployments.replica.capability import Capability


class SpeechServer(Capability):
    paths = frozenset({"/v1/audio/speech"})
