"""From the body of a request to what is to be drawn, within the limits of the model."""

import math
import re
from dataclasses import dataclass
from math import inf
from typing import Any

from PIL import Image
from pydantic import ValidationError

from deployments.engines.asgi import BadField
from deployments.engines.diffusers import picture_files
from deployments.engines.forms import Form
from deployments.requests.image_fields import ImageFields, VariationFields

STRENGTH = 0.8  # of an edit where a request says nothing: diffusers' own
# Of a variation: nothing but the picture says what is to be seen. Of 16 variations of drawings, 16
# show the same shape and colours at 0.2, 14 at 0.3, and 12 at 0.4.
VARIATION_STRENGTH = 0.3
_SIZE = re.compile(r"(\d+)x(\d+)")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a loaded model can do, and its defaults."""

    width: int  # pixels, where a request names no size
    height: int
    multiple: int  # of which both sides must be one
    max_pixels: int
    steps: int
    max_steps: int
    guidance: float | None  # None: the pipeline's own
    takes_guidance: bool
    takes_negative: bool
    can_edit: bool
    can_inpaint: bool


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    """The picture that an edit begins with; equal only to itself, so that no other request joins
    its batch."""

    image: Image.Image  # RGB, of the size of the result
    mask: Image.Image | None  # L; what is white is painted anew
    strength: float


@dataclass(frozen=True, slots=True)
class Setting:
    """What all pictures of one batch have in common."""

    width: int
    height: int
    steps: int
    guidance: float | None
    adapter: str  # the folder of its checked copy; empty: none
    edit: Edit | None = None


def fields_of(body: dict[str, Any], kind: type[ImageFields] = ImageFields) -> ImageFields:
    """Raises BadField."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        field = str(problem["loc"][0])
        raise BadField(field, f"`{field}`: {problem['msg']}") from error


def setting_of(
    fields: ImageFields, limits: Limits, adapter: str, edit: Edit | None = None
) -> Setting:
    """Raises BadField for what this model cannot do."""
    steps = fields.x_steps or limits.steps
    if steps > limits.max_steps:
        raise BadField("x_steps", f"{steps} steps; this model takes at most {limits.max_steps}")
    if fields.x_negative_prompt and not limits.takes_negative:
        raise BadField("x_negative_prompt", "this model takes no negative prompt")
    if fields.x_guidance is not None and not limits.takes_guidance:
        raise BadField("x_guidance", "this model takes no guidance")
    if edit is not None and int(steps * edit.strength) < 1:
        least = math.ceil(1 / edit.strength)
        raise BadField("x_strength", f"{edit.strength} of {steps} steps is none; take {least}")
    guidance = limits.guidance if fields.x_guidance is None else fields.x_guidance
    width, height = edit.image.size if edit else size_of(fields.size, limits)
    file_format = fields.output_format or "png"
    most = picture_files.MAX_SIDES.get(file_format, inf)
    if max(width, height) > most:
        raise BadField("size", f"{width}x{height}: a {file_format} has at most {most} on a side")
    return Setting(width, height, steps, guidance, adapter, edit)


def size_of(size: str | None, limits: Limits) -> tuple[int, int]:
    """Returns width and height in pixels. Raises BadField."""
    match = _SIZE.fullmatch(size or "")
    if match is None:  # auto
        return _fitted((limits.width, limits.height), limits)
    width, height = int(match[1]), int(match[2])
    if width % limits.multiple or height % limits.multiple:
        raise BadField("size", f"{size}: both sides must be multiples of {limits.multiple}")
    if width * height > limits.max_pixels:
        raise BadField("size", f"{size}: this model draws at most {limits.max_pixels} pixels")
    return width, height


def edit_of(form: Form, fields: ImageFields, limits: Limits) -> Edit:
    """The uploads of an edit at the size of the result. Raises BadField."""
    uploads = form.files.get("image", []) + form.files.get("image[]", [])
    if len(uploads) != 1:
        raise BadField("image", f"{len(uploads)} files in `image`; this model edits one picture")
    if not limits.can_edit:
        raise BadField("model", "this model makes pictures from text only")
    upload = picture_files.open_upload(uploads[0], "image")
    size, is_own = upload.size, fields.size in (None, "auto")
    result_size = _fitted(size, limits) if is_own else size_of(fields.size, limits)
    image = _rgb(upload).resize(result_size, Image.Resampling.LANCZOS)
    del upload  # before the mask is decoded: each may be 64 MiB
    mask = _mask(form, size, limits)
    is_variation = isinstance(fields, VariationFields)
    strength = fields.x_strength or (
        1.0 if mask else VARIATION_STRENGTH if is_variation else STRENGTH
    )
    return Edit(image, mask and mask.resize(result_size), strength)


def _rgb(upload: Image.Image) -> Image.Image:
    return upload if upload.mode == "RGB" else upload.convert("RGB")


def _mask(form: Form, size: tuple[int, int], limits: Limits) -> Image.Image | None:
    """Raises BadField."""
    if not (uploads := form.files.get("mask", [])):
        return None
    if not limits.can_inpaint:
        raise BadField("mask", "this model edits whole pictures only; send no mask")
    mask = picture_files.mask_of(picture_files.open_upload(uploads[-1], "mask"))
    if mask.size != size:
        (w, h), (wide, high) = mask.size, size
        raise BadField("mask", f"{w}x{h} pixels; `image` has {wide}x{high}, and both must agree")
    if mask.getextrema() == (0, 0):
        raise BadField("mask", "nothing in it is transparent (or white), so nothing would change")
    return mask


def _fitted(size: tuple[int, int], limits: Limits) -> tuple[int, int]:
    """The size of a picture, reduced to what the model draws."""
    width, height = size
    scale = min(1.0, math.sqrt(limits.max_pixels / (width * height)))

    def side(pixels: float) -> int:
        return max(1, int(pixels * scale) // limits.multiple) * limits.multiple

    most = side(limits.max_pixels / limits.multiple / scale)  # beside the shortest other side
    return min(side(width), most), min(side(height), most)
