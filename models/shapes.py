"""A world of drawings: one shape of one colour on a background, with captions and an oracle.

The default models of pictures learn it and are tested by it, because `read` tells exactly what a
picture shows: it misreads none of 672 drawings.
"""

from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

SIZE = 64  # pixels on a side
COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (240, 210, 40),
    "white": (245, 245, 245),
    "black": (15, 15, 15),
    "orange": (240, 130, 30),
    "purple": (140, 50, 170),
}
SHAPES = ("circle", "square", "triangle", "cross")
UNSEEN = 10_000  # seeds of drawings that no training has seen begin here

_FINE = 4  # drawings and templates are drawn this much larger, then reduced: smooth edges
_ARM = 0.38  # half the width of a cross's arm, of its half extent
_LEAST_PIXELS = 60  # of 4,096; less than this of other colours than the background is no shape
_NAMES = tuple(COLOURS)
_PALETTE = np.array(list(COLOURS.values()), float)


class Fact(NamedTuple):
    """What a drawing shows."""

    colour: str
    shape: str
    background: str

    @property
    def caption(self) -> str:
        """`a red circle on blue`."""
        return f"a {self.colour} {self.shape} on {self.background}"


class Seen(NamedTuple):
    """What `read` finds; `fact` is None where the picture has one colour."""

    fact: Fact | None
    background: str
    fit: float  # intersection over union with the shape's template, 0 to 1


def all_facts() -> list[Fact]:
    """Every shape of every colour on every other colour: 224."""
    return [
        Fact(colour, shape, background)
        for colour in COLOURS
        for shape in SHAPES
        for background in COLOURS
        if background != colour
    ]


def draw(fact: Fact, random: np.random.Generator | None = None) -> Image.Image:
    """A drawing of SIZE x SIZE. `random` moves the shape a little off the middle and varies its
    size; without it the drawing is the same each time."""
    radius, x, y = 0.3, 0.5, 0.5
    if random is not None:
        radius = random.uniform(0.27, 0.33)
        x, y = random.uniform(0.45, 0.55, 2)
    side = SIZE * _FINE
    image = Image.new("RGB", (side, side), COLOURS[fact.background])
    _fill(image, fact.shape, x * side, y * side, radius * side, COLOURS[fact.colour])
    return image.resize((SIZE, SIZE), Image.Resampling.LANCZOS)


def _fill(
    image: Image.Image, shape: str, x: float, y: float, r: float, ink: tuple[int, ...] | int
) -> None:
    """Fills the shape around (x, y), `r` from its middle to its sides."""
    canvas = ImageDraw.Draw(image)
    if shape == "circle":
        canvas.ellipse([x - r, y - r, x + r, y + r], fill=ink)
        return
    w = _ARM * r
    corners = {
        "square": ((-r, -r), (r, -r), (r, r), (-r, r)),
        "triangle": ((0, -r), (r, r), (-r, r)),
        "cross": (
            *((-w, -r), (w, -r), (w, -w), (r, -w), (r, w), (w, w)),
            *((w, r), (-w, r), (-w, w), (-r, w), (-r, -w), (-w, -w)),
        ),
    }[shape]
    canvas.polygon([(x + dx, y + dy) for dx, dy in corners], fill=ink)


def read(picture: Image.Image) -> Seen:
    """What a picture of any size shows: the background is the colour of most of its border, by the
    nearest of COLOURS; the colour is the most frequent other one; the shape is the template that
    overlaps those pixels best."""
    pixels = np.asarray(picture.convert("RGB").resize((SIZE, SIZE)), float)
    nearest = ((pixels[:, :, None] - _PALETTE) ** 2).sum(-1).argmin(-1)
    border = np.concatenate([nearest[0], nearest[-1], nearest[:, 0], nearest[:, -1]])
    background = int(np.bincount(border).argmax())
    others = nearest[nearest != background]
    if others.size < _LEAST_PIXELS:
        return Seen(None, _NAMES[background], 0.0)
    colour = int(np.bincount(others).argmax())
    mask = nearest == colour
    fits = {shape: _overlap(mask, shape) for shape in SHAPES}
    shape = max(fits, key=lambda name: fits[name])
    return Seen(Fact(_NAMES[colour], shape, _NAMES[background]), _NAMES[background], fits[shape])


def _overlap(mask: np.ndarray, shape: str) -> float:
    """Intersection over union of `mask` (SIZE x SIZE) and the shape that fills its extent."""
    ys, xs = np.nonzero(mask)
    left, right, top, bottom = xs.min(), xs.max() + 1, ys.min(), ys.max() + 1
    template = Image.new("L", (SIZE * _FINE, SIZE * _FINE), 0)
    middle = ((left + right) / 2 * _FINE, (top + bottom) / 2 * _FINE)
    _fill(template, shape, *middle, max(right - left, bottom - top) / 2 * _FINE, 255)
    filled = np.asarray(template.resize((SIZE, SIZE))) > 127
    return float((mask & filled).sum() / (mask | filled).sum())
