"""The fields that type checkers know are those of the front's request models."""

from typing import Any

import pytest
from pydantic import BaseModel

from deployments.client import fields
from deployments.front.inference import schemas

# What the methods take by other names, or set themselves.
TAKEN = {
    "model", "messages", "prompt", "input", "query", "documents", "file", "stream",
    "stream_options", "partial_images", "encoding_format", "granularities", "stream_format",
    "return_documents", "texts", "return_text", "raw_scores", "truncate", "truncation_direction",
}  # fmt: skip


@pytest.mark.spec("J7")
@pytest.mark.parametrize(
    ("typed", "model", "unlike"),
    [
        (fields.Fields, schemas.Body, set()),
        (fields.ChatFields, schemas.Chat, set()),
        (fields.CompletionFields, schemas.Completion, set()),
        (fields.EmbeddingFields, schemas.Embeddings, set()),
        (fields.RerankFields, schemas.Reranks, set()),
        (fields.ImageFields, schemas.Images, {"response_format"}),  # always in the answer
        (fields.TranscriptionFields, schemas.Transcription, {"response_format", "prompt"}),
        (fields.SpeechFields, schemas.Speech, set()),
        (fields.VadFields, schemas.Vad, set()),
    ],
)
def test_typed_fields_are_those_of_the_request_model(
    typed: Any, model: type[BaseModel], unlike: set[str]
) -> None:
    mine = set(typed.__annotations__) - {"extra_body"} - TAKEN
    assert mine - unlike == set(model.model_fields) - TAKEN - unlike
