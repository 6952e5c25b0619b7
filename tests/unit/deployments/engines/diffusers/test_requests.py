"""What a request asks for, within the limits of a model; every refusal names its field."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from deployments.engines import asgi
from deployments.engines.asgi import BadField
from deployments.engines.diffusers import requests
from deployments.engines.diffusers.requests import Limits, Setting
from deployments.engines.forms import Form
from deployments.requests.image_fields import VariationFields
from tests.support.archives import growth
from tests.support.pictures import png, upper_half

LIMITS = Limits(
    width=64,
    height=64,
    multiple=16,
    max_pixels=64 * 64,
    steps=10,
    max_steps=50,
    guidance=2.0,
    takes_guidance=True,
    takes_negative=True,
    can_edit=True,
    can_inpaint=True,
)
RED = png(Image.new("RGB", (64, 64), "red"))


def setting(limits: Limits = LIMITS, **fields: Any) -> Setting:
    return requests.setting_of(requests.fields_of({"prompt": "x", **fields}), limits, "")


def edit(limits: Limits = LIMITS, files: dict[str, Any] | None = None, **fields: Any) -> Setting:
    given = requests.fields_of({"prompt": "x", **fields})
    form = Form(files={"image": [RED]} if files is None else files)
    return requests.setting_of(given, limits, "", requests.edit_of(form, given, limits))


def refused(call: Any, *args: Any, **fields: Any) -> str:
    with pytest.raises(BadField) as caught:
        call(*args, **fields)
    return str(caught.value.param)


@pytest.mark.spec("J1", "L3")
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": "x" * 32_001}, "prompt"),
        ({"prompt": "half of a pair: \ud800"}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": 11}, "n"),
        ({"n": "many"}, "n"),
        ({"size": "64"}, "size"),
        ({"size": "0x64"}, "size"),
        ({"size": "-64x64"}, "size"),
        ({"size": "65x64"}, "size"),
        ({"size": "128x64"}, "size"),
        ({"size": "99999x99999"}, "size"),
        ({"size": "\uff11\uff16x16"}, "size"),
        ({"response_format": "url"}, "response_format"),
        ({"output_format": "svg"}, "output_format"),
        ({"output_format": "gif"}, "output_format"),
        ({"output_compression": 101}, "output_compression"),
        ({"background": "transparent"}, "background"),
        ({"partial_images": 4}, "partial_images"),
        ({"x_seed": -1}, "x_seed"),
        ({"x_seed": 2**64}, "x_seed"),
        ({"x_steps": 0}, "x_steps"),
        ({"x_steps": 51}, "x_steps"),
        ({"x_guidance": float("nan")}, "x_guidance"),
        ({"x_guidance": -1}, "x_guidance"),
        ({"x_negative_prompt": 3}, "x_negative_prompt"),
        ({"x_strength": 0}, "x_strength"),
        ({"x_strength": 1e-320}, "x_strength"),  # a number whose inverse is none
        ({"x_strength": 1.5}, "x_strength"),
    ],
)
def test_a_field_out_of_bounds_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    assert refused(setting, **fields) == field


@pytest.mark.spec("J1", "L3")
@pytest.mark.parametrize(
    ("file_format", "side", "is_taken"),
    [
        ("webp", 16_368, True),
        ("webp", 16_384, False),
        ("jpeg", 65_488, True),
        ("jpeg", 65_504, False),
        ("png", 99_984, True),
        (None, 99_984, True),
    ],
)
def test_a_side_that_the_format_of_the_answer_has_no_number_for_is_refused(
    file_format: str | None, side: int, is_taken: bool
) -> None:
    wide = replace(LIMITS, max_pixels=1 << 24)
    for size in (f"{side}x16", f"16x{side}"):
        if is_taken:
            assert setting(wide, size=size, output_format=file_format).steps == 10
        else:
            assert refused(setting, wide, size=size, output_format=file_format) == "size"


@pytest.mark.spec("L3")
@pytest.mark.parametrize("raw", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_picture_body_that_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(BadField) as caught:
        asgi.json_object(raw)
    assert caught.value.param == "body"


def test_defaults_are_the_models() -> None:
    assert setting() == Setting(64, 64, 10, 2.0, "")
    assert setting(size="auto", n=None, x_steps=None) == setting()
    assert setting(size="32x64", x_steps=3, x_guidance=0) == Setting(32, 64, 3, 0.0, "")


def test_the_models_own_size_is_reduced_to_what_its_configuration_lets_it_draw() -> None:
    made = setting(replace(LIMITS, width=1024, height=512, max_pixels=64 * 64))
    assert (made.width, made.height) == (80, 32)


@pytest.mark.spec("L3")
@pytest.mark.parametrize(
    ("cannot", "fields", "field"),
    [
        ({"takes_negative": False}, {"x_negative_prompt": "x"}, "x_negative_prompt"),
        ({"takes_guidance": False}, {"x_guidance": 1}, "x_guidance"),
    ],
)
def test_what_a_model_cannot_do_is_refused(
    cannot: dict[str, Any], fields: dict[str, Any], field: str
) -> None:
    assert refused(setting, replace(LIMITS, **cannot), **fields) == field
    assert setting(**fields).steps == 10


@pytest.mark.spec("L3")
@pytest.mark.parametrize(
    ("files", "fields", "field"),
    [
        ({}, {}, "image"),
        ({"image": [b""]}, {}, "image"),
        ({"image": [b"<svg/>"]}, {}, "image"),
        ({"image": [RED, RED]}, {}, "image"),
        ({"image[]": [RED], "image": [RED]}, {}, "image"),
        ({"image": [RED], "mask": [b"x"]}, {}, "mask"),
        ({"image": [RED], "mask": [upper_half((32, 32))]}, {}, "mask"),
        ({"image": [RED], "mask": [png(Image.new("L", (64, 64), 0))]}, {}, "mask"),
        ({"image": [RED]}, {"size": "17x16"}, "size"),
        ({"image": [RED]}, {"x_strength": 0.05}, "x_strength"),
    ],
)
def test_an_edit_that_cannot_be_is_refused_by_field(
    files: dict[str, Any], fields: dict[str, Any], field: str
) -> None:
    assert refused(edit, files=files, **fields) == field


@pytest.mark.spec("L3")
def test_a_model_without_edits_refuses_them() -> None:
    assert refused(edit, replace(LIMITS, can_edit=False)) == "model"
    masked = {"image": [RED], "mask": [upper_half()]}
    assert refused(edit, replace(LIMITS, can_inpaint=False), masked) == "mask"


@pytest.mark.spec("L2")
def test_an_edit_of_the_largest_upload_and_mask_holds_little_more_than_one_of_them() -> None:
    side = 4096
    decoded_bytes = 4 * side * side  # as Pillow has them, four bytes for each pixel
    files = {
        "image": [png(Image.new("RGB", (side, side), "red"))],
        "mask": [png(Image.new("L", (side, side), 255))],
    }
    with growth() as grown:
        assert edit(files=files).edit is not None
        assert grown() < 1.75 * decoded_bytes


def test_an_edit_has_the_size_of_its_picture_or_the_one_asked_for() -> None:
    assert edit().edit is not None
    wide = {"image[]": [png(Image.new("RGB", (300, 150), "red"))]}
    made = edit(files=wide)
    assert (made.width, made.height) == (80, 32)  # as large as the model draws, and as wide
    assert made.edit is not None and made.edit.image.size == (80, 32)
    assert edit(files=wide, size="32x32").width == 32


@given(st.integers(1, 20_000), st.integers(1, 20_000), st.integers(4, 300))
def test_a_fitted_size_is_a_size_that_the_model_draws(width: int, height: int, blocks: int) -> None:
    limits = replace(LIMITS, max_pixels=blocks * 16 * 16)
    fitted = requests._fitted((width, height), limits)
    assert requests.size_of("{}x{}".format(*fitted), limits) == fitted


def test_no_two_edits_share_a_batch() -> None:
    one, other = edit(), edit()
    assert one == one  # noqa: PLR0124 (equal to itself)
    assert one != other and setting() == setting()


def test_without_a_word_an_edit_keeps_some_and_a_mask_paints_anew() -> None:
    assert edit().edit.strength == requests.STRENGTH  # type: ignore[union-attr]
    masked = edit(files={"image": [RED], "mask": [upper_half()]}).edit
    assert masked is not None and masked.strength == 1.0 and masked.mask is not None
    assert masked.mask.getpixel((5, 5)) == 255 and masked.mask.getpixel((5, 60)) == 0


@pytest.mark.spec("J1", "L3")
def test_a_variation_has_no_prompt_and_keeps_more_of_its_picture() -> None:
    fields = requests.fields_of({"model": "m"}, VariationFields)
    assert fields.prompt == ""
    made = requests.edit_of(Form(files={"image": [RED]}), fields, LIMITS)
    assert made.strength == requests.VARIATION_STRENGTH < requests.STRENGTH
    assert refused(requests.fields_of, {"prompt": "a boat"}, VariationFields) == "prompt"
