"""Fields of the requests for pictures (OpenAI's, and those that start with `x_`), with the bounds
that hold for every model. The front checks them before a model is loaded; the engine adds what its
model allows.

Source: developers.openai.com, API reference, "Images"; openai-python, types/image_*_params.py.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

MAX_PICTURES = 10  # OpenAI's own bound on one request
MAX_PROMPT = 32_000  # characters; likewise
MAX_PARTIAL = 3  # likewise
MAX_STEPS = 1_000  # of the schedule that models are trained with
MAX_GUIDANCE = 100.0
MAX_SEED = 2**63 - 1 - MAX_PICTURES  # the pictures of a request have successive seeds

Format = Literal["png", "jpeg", "webp"]


class ImageFields(BaseModel):
    """Fields of generations and edits. OpenAI's `quality`, `style`, `moderation` and `user` are
    accepted and have no effect."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    prompt: str = Field(min_length=1, max_length=MAX_PROMPT)
    n: int | None = Field(None, ge=1, le=MAX_PICTURES, description="pictures")
    size: str | None = Field(
        None, pattern=r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$", description="WIDTHxHEIGHT"
    )
    response_format: Literal["b64_json"] | None = None
    output_format: Format | None = None
    output_compression: int | None = Field(None, ge=0, le=100, description="of jpeg and webp")
    background: Literal["opaque", "auto"] | None = None
    stream: bool | None = None
    partial_images: int | None = Field(None, ge=0, le=MAX_PARTIAL)
    x_seed: int | None = Field(
        None, ge=0, le=MAX_SEED, description="of the first picture; the next ones add 1"
    )
    x_steps: int | None = Field(None, ge=1, le=MAX_STEPS)
    x_guidance: float | None = Field(None, ge=0, le=MAX_GUIDANCE)
    x_negative_prompt: str | None = Field(None, max_length=MAX_PROMPT)
    x_strength: float | None = Field(
        None, ge=1 / MAX_STEPS, le=1, description="of an edit: 1 keeps nothing of the picture"
    )

    @field_validator("response_format", mode="before")
    @classmethod
    def _not_by_url(cls, value: object) -> object:
        if value == "url":
            raise ValueError("no pictures are stored here to have a URL; ask for b64_json")
        return value

    @field_validator("prompt", "x_negative_prompt")
    @classmethod
    def _is_text(cls, value: str | None) -> str | None:
        """JSON may carry half of a surrogate pair, which no tokenizer takes."""
        if value is not None and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise ValueError("not Unicode text: half of a surrogate pair in it")
        return value


class VariationFields(ImageFields):
    """Fields of variations, which begin with a picture and have no prompt."""

    prompt: Literal[""] = Field("", description="of an edit, not of a variation")
