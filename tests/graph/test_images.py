"""Pictures through the whole graph, by the official client, unchanged."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
from openai.types import ImageGenCompletedEvent, ImageGenPartialImageEvent

from deployments.config import load_plan
from models.shapes import Fact, draw
from tests.graph.conftest import Graph, until
from tests.support import pictures as pic
from tests.support.graph_commands import unload_all
from tests.support.image_models import make_adapter

DRAW, CHAT = "tiny-draw", "tiny-chat"
RED, GREEN = Fact("red", "circle", "blue"), Fact("green", "square", "white")
SEED: dict[str, Any] = {"x_seed": 3}


@pytest.fixture
def aclient(graph: Graph) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{graph.url}/v1", api_key="none", timeout=120, max_retries=0)


def shown(answer: Any) -> list[Fact | None]:
    return [pic.shows(pic.picture(row.model_dump())) for row in answer.data]


@pytest.mark.spec("H5", "J1", "H0", "M1")
def test_a_picture_is_drawn_from_nothing_loaded(graph: Graph, client: OpenAI) -> None:
    until(lambda: unload_all(graph) and not graph.engines(), 60, "nothing is loaded")
    answer = client.images.generate(model=DRAW, prompt=GREEN.caption, extra_body=SEED)
    assert shown(answer) == [GREEN]
    assert (answer.size, answer.output_format) == ("64x64", "png")
    assert answer.usage is not None and answer.usage.output_tokens == 64
    [ticket] = [t for t in graph.state()["tickets"] if t["model"] == DRAW]
    assert ticket["state"] == "resident"


@pytest.mark.spec("J1", "J2")
def test_fields_of_diffusers_reach_the_engine(client: OpenAI) -> None:
    def made(**more: Any) -> bytes:
        asked = client.images.generate(model=DRAW, prompt=RED.caption, extra_body=SEED | more)
        return pic.picture(asked.data[0].model_dump()).tobytes()  # type: ignore[index]

    plain = made()
    assert made() == plain
    for other in (
        {"x_seed": 4}, {"x_steps": 3}, {"x_guidance": 1}, {"x_negative_prompt": RED.caption}
    ):  # fmt: skip
        assert made(**other) != plain, other


@pytest.mark.spec("J1")
def test_several_pictures_in_a_format(client: OpenAI) -> None:
    answer = client.images.generate(
        model=DRAW, prompt=GREEN.caption, n=3, size="64x64", output_format="webp", extra_body=SEED
    )
    assert answer.data is not None and len(answer.data) == 3
    images = [pic.picture(row.model_dump()) for row in answer.data]
    assert {image.format for image in images} == {"WEBP"}
    assert len({image.tobytes() for image in images}) == 3


@pytest.mark.spec("H5", "J1")
def test_partial_pictures_are_streamed_to_the_client(client: OpenAI) -> None:
    stream = client.images.generate(
        model=DRAW, prompt=GREEN.caption, stream=True, partial_images=2, extra_body=SEED
    )
    events = list(stream)
    *partial, last = events
    assert [type(event) for event in partial] == [ImageGenPartialImageEvent] * 2
    assert [event.partial_image_index for event in partial] == [0, 1]  # type: ignore[union-attr]
    assert isinstance(last, ImageGenCompletedEvent)
    assert pic.shows(pic.picture(last.model_dump())) == GREEN


@pytest.mark.spec("H5", "J3")
def test_stream_of_a_picture_tells_of_the_load_before_its_steps(graph: Graph) -> None:
    until(lambda: unload_all(graph), 60, "nothing is loaded")
    body = {"model": DRAW, "prompt": GREEN.caption, "stream": True, **SEED}
    request = urllib.request.Request(
        f"{graph.url}/v1/images/generations",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        said = answer.read()
    text = said.decode()
    assert text.startswith(": phase=") and text.index(": phase=") < text.index(": picture=0 step=1")
    [(name, last)] = pic.events(said)
    assert name == "image_generation.completed" and pic.shows(pic.picture(last)) == GREEN


@pytest.mark.spec("H5", "J1")
def test_a_picture_is_edited_whole_and_in_part(client: OpenAI) -> None:
    whole = client.images.edit(
        model=DRAW,
        image=("red.png", pic.drawn(RED)),
        prompt=GREEN.caption,
        extra_body=SEED | {"x_strength": 1.0},
    )
    assert shown(whole) == [GREEN]
    part = client.images.edit(
        model=DRAW,
        image=("red.png", pic.drawn(RED)),
        mask=("mask.png", pic.upper_half()),
        prompt=GREEN.caption,
        extra_body=SEED,
    )
    assert part.data is not None
    made, lower = pic.picture(part.data[0].model_dump()), (0, 32, 64, 64)
    assert made.crop(lower).tobytes() == draw(RED).crop(lower).tobytes()
    assert made.tobytes() != draw(RED).tobytes()


@pytest.mark.spec("H5", "J1", "L2", "L3")
def test_variations_of_a_picture_come_without_a_prompt(client: OpenAI) -> None:
    made = client.images.create_variation(
        model=DRAW, image=("red.png", pic.drawn(RED)), n=2, extra_body=SEED | {"x_strength": 0.2}
    )
    assert shown(made) == [RED, RED]
    with pytest.raises(BadRequestError) as caught:
        client.images.create_variation(model=DRAW, image=("x.svg", b"<svg/>"))
    assert caught.value.param == "image"
    with pytest.raises(BadRequestError) as caught:
        client.images.create_variation(
            model=DRAW, image=("red.png", pic.drawn(RED)), response_format="url"
        )
    assert caught.value.param == "response_format"


@pytest.mark.spec("J1")
async def test_the_asynchronous_client_generates_edits_varies_and_streams(
    aclient: AsyncOpenAI,
) -> None:
    async with aclient as client:
        drawn, edited, stream, varied = await asyncio.gather(
            client.images.generate(model=DRAW, prompt=GREEN.caption, extra_body=SEED),
            client.images.edit(
                model=DRAW,
                image=("red.png", pic.drawn(RED)),
                prompt=GREEN.caption,
                extra_body=SEED | {"x_strength": 1.0},
            ),
            client.images.edit(
                model=DRAW,
                image=("red.png", pic.drawn(RED)),
                prompt=GREEN.caption,
                stream=True,
                partial_images=1,
                extra_body=SEED | {"x_strength": 1.0},
            ),
            client.images.create_variation(
                model=DRAW,
                image=("red.png", pic.drawn(RED)),
                extra_body=SEED | {"x_strength": 0.2},
            ),
        )
        assert shown(drawn) == shown(edited) == [GREEN] and shown(varied) == [RED]
        kinds = [event.type async for event in stream]
    assert kinds == ["image_edit.partial_image", "image_edit.completed"]


@pytest.mark.spec("H5", "J8", "L3")
def test_twenty_clients_at_once_get_each_their_own_picture(client: OpenAI) -> None:
    alone = client.images.generate(model=DRAW, prompt=GREEN.caption, extra_body=SEED)

    def ask(number: int) -> Any:
        prompt = GREEN.caption if number % 2 else RED.caption
        return client.images.generate(model=DRAW, prompt=prompt, extra_body=SEED)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(20)))
    before = pic.picture(alone.data[0].model_dump())  # type: ignore[index]
    for number, answer in enumerate(answers):
        image = pic.picture(answer.data[0].model_dump())
        # Sums in another order add up over the steps; a picture of the other caption is 50 away.
        same = pic.difference(image, before) <= 4 * pic.ROUNDING
        assert same == bool(number % 2), number


@pytest.mark.spec("J1", "L3")
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": "url"}, "response_format"),
        ({"n": 11}, "n"),
        ({"size": "63x64"}, "size"),
        ({"size": "4096x4096"}, "size"),
        ({"output_format": "svg"}, "output_format"),
        ({"extra_body": {"x_steps": 10_000}}, "x_steps"),
        ({"extra_body": {"x_steps": 101}}, "x_steps"),
    ],
)
def test_a_bad_field_is_named_to_the_client(
    client: OpenAI, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.images.generate(model=DRAW, prompt=RED.caption, **fields)
    assert caught.value.param == field


BAD_FILES = {
    "nothing": b"",
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg"><script/></svg>',
    "truncated": pic.drawn(RED)[:200],
    "gif": pic.png(draw(RED), "GIF"),
    "a header of 2^31 pixels a side": pic.drawn(RED)[:16] + b"\x7f\xff\xff\xff" * 2 + b"x" * 50,
    "a mask as long as the form": b"\0" * (1 << 20),
}


@pytest.fixture(params=BAD_FILES)
def bad_file(request: pytest.FixtureRequest) -> Iterator[bytes]:
    yield BAD_FILES[request.param]


@pytest.mark.spec("L2", "L3")
def test_a_file_that_is_no_picture_is_refused_and_harms_no_one(
    graph: Graph, client: OpenAI, bad_file: bytes
) -> None:
    fields = {"model": DRAW, "prompt": "x"}
    for files, field in (
        ({"image": bad_file}, "image"),
        ({"image": pic.drawn(RED), "mask": bad_file}, "mask"),
    ):
        raw = pic.form(fields, files)
        request = urllib.request.Request(f"{graph.url}/v1/images/edits", raw, pic.FORM)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=60)
        assert caught.value.code == 400
        assert json.loads(caught.value.read())["error"]["param"] == field
    assert shown(client.images.generate(model=DRAW, prompt=GREEN.caption, extra_body=SEED)) == [
        GREEN
    ]


@pytest.mark.spec("J1")
def test_a_chat_model_draws_nothing(client: OpenAI) -> None:
    with pytest.raises(NotFoundError, match="not at /v1/images/generations"):
        client.images.generate(model=CHAT, prompt="x")


@pytest.mark.spec("H5", "F2", "L2")
def test_adapter_of_pictures_behind_an_allowed_url_is_called_by_name(
    graph: Graph, client: OpenAI
) -> None:
    folder, elsewhere = graph.folder / "drawn", graph.folder / "elsewhere" / "drawn"
    make_adapter(Path(load_plan.resolve(f"made:{DRAW}")), elsewhere, seed=5)
    folder.mkdir()
    rows = {"sketch": f"file://{elsewhere}/", "stranger": "file:///etc/"}
    (folder / "remote.json").write_text(json.dumps(rows))

    def made(model: str) -> bytes:
        answer = client.images.generate(model=model, prompt=RED.caption, extra_body=SEED)
        return pic.picture(answer.data[0].model_dump()).tobytes()  # type: ignore[index]

    plain = made(DRAW)
    assert made(f"{DRAW}:sketch") == made("sketch") != plain
    assert made(DRAW) == plain
    with pytest.raises(BadRequestError, match=r"adapters\.urls"):
        made("stranger")
