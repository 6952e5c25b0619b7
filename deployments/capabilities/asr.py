"""Transcription: sound in, text out, by the Whisper family in its engine."""

from deployments.replica.capability import Capability


class TranscriptionServer(Capability):
    paths = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
