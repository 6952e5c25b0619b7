"""Drawings of facts that no training has seen, as clients send pictures."""

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from models import shapes

FACTS = shapes.all_facts()


def drawing(number: int) -> Image.Image:
    return shapes.draw(FACTS[number], np.random.default_rng(shapes.UNSEEN + number))


def uri(picture: Image.Image, form: str = "PNG", **more: Any) -> str:
    """As a data: URI; `more` is for Pillow."""
    buffer = io.BytesIO()
    picture.save(buffer, form, **more)
    return f"data:image/{form.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
