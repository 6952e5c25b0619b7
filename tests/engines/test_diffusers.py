"""Pictures in a child: what a prompt says is what the picture shows, whatever shares its batch."""

import asyncio
import fcntl
import json
import os
import shutil
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from deployments import messages
from deployments.engines import dispatch_lock
from deployments.engines.diffusers import engine as module
from deployments.engines.diffusers import pipeline
from deployments.engines.diffusers.batches import DrawnPicture, DrawRequest, Step
from deployments.engines.diffusers.requests import Limits, Setting
from deployments.engines.forms import Form
from deployments.requests.image_fields import ImageFields
from models import shapes
from models.shapes import Fact, all_facts
from tests.support import image_models
from tests.support import pictures as pic
from tests.support.archives import growth
from tests.support.engine_host import (
    Child,
    ZygoteUnderTest,
    device_bytes,
    host_bytes,
    is_gone,
    reads_no_weights,
    served,
    until,
    waits_for_a_lock,
)
from tests.support.image_models import make_adapter, wide_pipeline

ENTRY = "deployments.engines.diffusers.engine:build"
ARGS = {"steps": 10, "guidance": 2.0, "max_batch": 8}
MIB = 1 << 20
GENERATIONS = "/v1/images/generations"
VARIATIONS = "/v1/images/variations"
RED, GREEN = Fact("red", "circle", "blue"), Fact("green", "square", "white")


def config(model: Path, **more: Any) -> dict[str, Any]:
    return {"model": str(model), "served_name": "draw", "engine_args": ARGS, **more}


@pytest.fixture(scope="module")
def draw(engines: ZygoteUnderTest, drawing: Path) -> Iterator[Child]:
    with served(engines, "draw", ENTRY, config(drawing, can_sleep=False)) as child:
        yield child


def ask(child: Child, prompt: str, **more: Any) -> tuple[int, Any]:
    return child.call("POST", GENERATIONS, {"model": "draw", "prompt": prompt, **more})


def one(child: Child, prompt: str, **more: Any) -> Image.Image:
    status, body = ask(child, prompt, **more)
    assert status == 200, body
    [image] = pic.pictures(body)
    return image


@pytest.mark.spec("H5", "J1", "M1")
def test_pictures_show_what_their_prompts_say(draw: Child) -> None:
    facts = all_facts()[::16]
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda fact: one(draw, fact.caption, x_seed=1), facts))
    wrong = [f for f, image in zip(facts, made, strict=True) if pic.shows(image) != f]
    assert len(wrong) <= 2, wrong


@pytest.mark.spec("H5")
def test_picture_is_the_same_whatever_shares_its_batch(draw: Child) -> None:
    alone = one(draw, RED.caption, x_seed=7)
    prompts = [(RED.caption, 7), *((fact.caption, n) for n, fact in enumerate(all_facts()[:15]))]
    with ThreadPoolExecutor(16) as pool:
        crowd = list(pool.map(lambda p: one(draw, p[0], x_seed=p[1]), prompts))
    assert pic.difference(crowd[0], alone) <= pic.ROUNDING
    assert pic.difference(crowd[0], crowd[1]) > 50


@pytest.mark.spec("H5", "K1")
def test_log_has_no_words_of_a_prompt_that_is_too_long_for_its_encoder(draw: Child) -> None:
    assert ask(draw, f"{RED.caption} " * 40 + "confidential")[0] == 200
    assert "confidential" not in draw.log and RED.caption not in draw.log


@pytest.mark.spec("H5", "J1")
def test_pictures_of_one_request_have_successive_seeds(draw: Child) -> None:
    status, body = ask(draw, RED.caption, n=3, x_seed=7)
    assert status == 200
    assert [row["x_seed"] for row in body["data"]] == [7, 8, 9]
    first, second, _ = pic.pictures(body)
    assert pic.difference(second, one(draw, RED.caption, x_seed=8)) <= pic.ROUNDING
    assert pic.difference(first, second) > pic.ROUNDING


@pytest.mark.spec("J1")
def test_without_a_seed_each_picture_is_another_and_says_its_seed(draw: Child) -> None:
    bodies = [ask(draw, RED.caption)[1] for _ in range(2)]
    seeds = [body["data"][0]["x_seed"] for body in bodies]
    assert seeds[0] != seeds[1]
    again = one(draw, RED.caption, x_seed=seeds[0])
    assert pic.difference(again, pic.pictures(bodies[0])[0]) <= pic.ROUNDING


@pytest.mark.spec("J1")
@pytest.mark.parametrize("file_format", ["png", "jpeg", "webp"])
def test_pictures_come_in_the_format_asked_for(draw: Child, file_format: str) -> None:
    status, body = ask(draw, RED.caption, output_format=file_format, x_seed=1, size="64x64")
    assert (status, body["output_format"], body["size"]) == (200, file_format, "64x64")
    [image] = pic.pictures(body)
    assert image.format == file_format.upper()
    assert (
        pic.difference(image.resize((8, 8)), one(draw, RED.caption, x_seed=1).resize((8, 8))) < 10
    )
    assert body["usage"]["input_tokens_details"]["text_tokens"] == 7  # 5 words and 2 marks
    assert body["usage"]["output_tokens"] == 64  # 8x8 latents


@pytest.mark.spec("H5", "J1")
def test_steps_and_partial_pictures_are_streamed(draw: Child) -> None:
    body = {"model": "draw", "prompt": RED.caption, "stream": True, "partial_images": 3}
    raw = json.dumps(body | {"x_seed": 7}).encode()
    _, answer, connection = pic.send(draw, GENERATIONS, raw, {"content-type": "application/json"})
    assert answer.getheader("content-type") == "text/event-stream"
    said = answer.read()
    connection.close()
    steps = [line for line in said.decode().splitlines() if line.startswith(": picture=0 step=")]
    assert steps == [f": picture=0 step={step} of=10" for step in range(1, 11)]
    events = pic.events(said)
    partial, completed = "image_generation.partial_image", "image_generation.completed"
    assert [name for name, _ in events] == [partial, partial, partial, completed]
    assert [data["type"] for _, data in events] == [name for name, _ in events]
    assert [data["partial_image_index"] for _, data in events[:3]] == [0, 1, 2]
    last = pic.picture(events[3][1])
    assert pic.difference(last, one(draw, RED.caption, x_seed=7)) <= pic.ROUNDING
    far = [pic.difference(pic.picture(data), last) for _, data in events[:3]]
    assert min(far) > pic.ROUNDING  # each is earlier than the end


@pytest.mark.spec("H5")
def test_edit_keeps_its_picture_the_more_the_weaker_it_is(draw: Child) -> None:
    fields = {"model": "draw", "prompt": GREEN.caption, "x_seed": 3}
    files = {"image": pic.drawn(RED)}
    status, weak = pic.edit(draw, fields | {"x_strength": 0.2}, files)
    assert (status, weak["size"]) == (200, "64x64")
    assert pic.shows(pic.pictures(weak)[0]) == RED
    status, full = pic.edit(draw, fields | {"x_strength": 1.0}, files)
    assert status == 200
    assert pic.shows(pic.pictures(full)[0]) == GREEN


@pytest.mark.spec("H5", "J1")
def test_variations_resemble_their_picture_and_differ(draw: Child) -> None:
    fields = {"model": "draw", "x_seed": 3, "n": 4, "x_strength": 0.2}
    files = {"image": pic.drawn(RED)}
    status, body = pic.edit(draw, fields, files, VARIATIONS)
    assert status == 200, body
    made = pic.pictures(body)
    assert {pic.shows(picture) for picture in made} == {RED}
    assert len({picture.tobytes() for picture in made}) == 4
    assert shapes.draw(RED).tobytes() not in {picture.tobytes() for picture in made}
    for wrong, field in (({"prompt": "x"}, "prompt"), ({"size": "65x64"}, "size")):
        status, said = pic.edit(draw, fields | wrong, files, VARIATIONS)
        assert (status, said["error"]["param"]) == (400, field)
    status, said = pic.edit(draw, fields, {}, VARIATIONS)
    assert (status, said["error"]["param"]) == (400, "image")


@pytest.mark.spec("H5")
def test_what_a_mask_leaves_is_kept_to_the_pixel(draw: Child) -> None:
    fields = {"model": "draw", "prompt": GREEN.caption, "x_seed": 3}
    status, body = pic.edit(draw, fields, {"image": pic.drawn(RED), "mask": pic.upper_half()})
    assert status == 200, body
    [made], before = pic.pictures(body), shapes.draw(RED)
    lower, upper = (0, 32, 64, 64), (0, 0, 64, 32)
    assert made.crop(lower).tobytes() == before.crop(lower).tobytes()
    assert pic.difference(made.crop(upper), before.crop(upper)) > 100


@pytest.mark.spec("L3")
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"size": "65x64"}, "size"),
        ({"size": "1024x1024"}, "size"),
        ({"n": 11}, "n"),
        ({"x_steps": 101}, "x_steps"),
        ({"response_format": "url"}, "response_format"),
        ({"output_format": "svg"}, "output_format"),
        ({"prompt": ""}, "prompt"),
        ({"model": "another"}, "model"),
    ],
)
def test_bad_picture_request_is_refused_by_field(
    draw: Child, change: dict[str, Any], field: str
) -> None:
    body = {"model": "draw", "prompt": "a red circle on blue", "x_steps": 1, **change}
    status, said = draw.call("POST", GENERATIONS, body)
    assert (status, said["error"]["param"]) == (400, field)
    assert ask(draw, RED.caption, x_steps=1)[0] == 200


@pytest.mark.spec("L2", "L3")
@pytest.mark.parametrize("raw", [b"", b"<svg/>", b"GIF89a", b"\x89PNG\r\n\x1a\n" + b"\xff" * 90])
def test_upload_that_is_no_picture_is_refused(draw: Child, raw: bytes) -> None:
    status, said = pic.edit(draw, {"prompt": "x", "x_steps": 1}, {"image": raw})
    assert (status, said["error"]["param"]) == (400, "image")


def test_body_that_is_no_form_is_refused(draw: Child) -> None:
    status, said = draw.call("POST", "/v1/images/edits", {"prompt": "x"})
    assert (status, said["error"]["param"]) == (400, "body")
    assert draw.call("POST", "/v1/images/unknown", {})[0] == 404
    assert draw.call("GET", "/v1/models")[1]["data"][0]["id"] == "draw"


@pytest.mark.spec("A17", "D6")
def test_pipeline_that_is_loaded_anew_is_gone_before_the_next_is_read(
    drawing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pipeline.Pipeline(str(drawing), {}, 1, 1)
    made.load()
    before = weakref.ref(made.pipe.unet)
    read = pipeline.AutoPipelineForText2Image.from_pretrained
    left: list[bool] = []

    def reads(*args: Any, **more: Any) -> Any:
        left.append(before() is None)
        return read(*args, **more)

    monkeypatch.setattr(pipeline.AutoPipelineForText2Image, "from_pretrained", reads)
    made.load()
    assert left == [True]


@pytest.mark.spec("H5")
def test_edits_and_masks_take_the_modules_that_are_loaded_and_not_a_byte_more(
    drawing: Path,
) -> None:
    made = pipeline.Pipeline(str(drawing), {"vae_tiling": True}, 1, 1)
    made.load()
    modules = {k: v for k, v in made.pipe.components.items() if isinstance(v, torch.nn.Module)}
    assert {"unet", "vae", "text_encoder"} <= modules.keys()
    for other in (made._image2image, made._inpainting):
        assert all(other.components[name] is module for name, module in modules.items())
    assert made.pipe.vae.use_tiling is True


@pytest.mark.spec("H5", "A8")
async def test_a_drawing_without_clients_ends_between_two_steps(drawing: Path) -> None:
    engine = module.build(config(drawing, can_sleep=False))
    await engine.load()
    scheduler, steps = engine.pipeline.pipe.scheduler, []
    step = scheduler.step
    scheduler.step = lambda *args, **more: steps.append(1) or step(*args, **more)

    def draw_request(count: int) -> DrawRequest:
        return DrawRequest(Setting(64, 64, count, 2.0, ""), RED.caption, "", [1])

    async with asyncio.timeout(120):
        async with aclosing(engine.batches.events(draw_request(1_000))) as events:
            async for event in events:
                if isinstance(event, Step) and event.step == 3:
                    break
        async with aclosing(engine.batches.events(draw_request(10))) as events:
            made = [event async for event in events if isinstance(event, DrawnPicture)]
    assert pic.shows(made[0].image) == RED
    assert len(steps) < 500


@pytest.mark.spec("H5", "A8", "J8")
def test_next_picture_is_drawn_after_a_client_left(engines: ZygoteUnderTest, drawing: Path) -> None:
    """Not after the 10,000 steps that it had asked for, which would take minutes."""
    given = config(drawing) | {"engine_args": ARGS | {"max_steps": 1000, "max_batch": 1}}
    with served(engines, "leaves", ENTRY, given | {"can_sleep": False}) as child:
        body = {"model": "draw", "prompt": RED.caption, "stream": True, "x_steps": 1000, "n": 10}
        _, answer, connection = pic.send(
            child, GENERATIONS, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        assert answer.readline().startswith(b": picture=0 step=1 ")
        answer.close()
        connection.close()
        assert pic.shows(one(child, RED.caption, x_seed=1)) == RED


@pytest.mark.spec("D1", "D6", "H5")
def test_weights_of_a_pipeline_sleep_on_the_host_and_draw_the_same_picture_without_the_disk(
    engines: ZygoteUnderTest, tmp_path: Path
) -> None:
    """100 M parameters: an engine of 80 MB cannot give back nine tenths of less."""
    model = wide_pipeline(tmp_path / "wide")
    given = config(model) | {"engine_args": {"steps": 2, "guidance": 2.0}}
    with served(engines, "sleeps", ENTRY, given) as child:
        before = one(child, "anything", x_seed=5)
        awake = device_bytes(child.pid)
        for _ in range(2):
            assert child.call("POST", "/control/sleep")[0] == 200
            assert ask(child, "anything")[0] == 503
            assert device_bytes(child.pid) < awake - 350 * MIB  # of 400 MB in float32
            assert host_bytes(child.pid) > 350 * MIB
            with reads_no_weights(child.pid, model):
                assert child.call("POST", "/control/wake")[1]["verified"] is True
            assert one(child, "anything", x_seed=5).tobytes() == before.tobytes()
        assert host_bytes(child.pid) == 0


@pytest.mark.spec("H5", "F1")
def test_adapters_are_served_by_name_and_leave_the_base_as_it_was(
    engines: ZygoteUnderTest, drawing: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "adapters"
    for number, name in enumerate(("night", "@acme/day", "third")):
        make_adapter(drawing, folder / name, seed=number)
    shutil.copytree(folder / "night", folder / "broken")
    (folder / "broken" / "adapter_model.safetensors").write_bytes(b"\x80\x04pickle.")
    given = {"folder": str(folder), "store": str(tmp_path / "store"), "max_rank": 8, "slots": 1}
    with served(engines, "lora", ENTRY, config(drawing, adapters=given, can_sleep=False)) as child:
        plain = one(child, RED.caption, x_seed=7)

        def adapted(name: str, tenant: str = "") -> tuple[int, Any]:
            body = {"model": name, "prompt": RED.caption, "x_seed": 7}
            headers = {"content-type": "application/json", messages.TENANT_HEADER: tenant}
            _, answer, connection = pic.send(child, GENERATIONS, json.dumps(body).encode(), headers)
            raw = answer.read()
            connection.close()
            return answer.status, json.loads(raw)

        [night] = pic.pictures(adapted("draw:night")[1])
        [third] = pic.pictures(adapted("third")[1])  # takes the one slot
        [again] = pic.pictures(adapted("draw:night")[1])
        names = {"names": ["draw:night", "draw:third", "draw:day"]}
        tiers = child.call("POST", messages.ADAPTERS, names)[1]["tiers"]
        assert tiers == {"draw:night": "hot", "draw:third": "cold"}, "day is another tenant's"
        assert pic.difference(night, plain) > 20 < pic.difference(third, night)
        assert again.tobytes() == night.tobytes()
        assert one(child, RED.caption, x_seed=7).tobytes() == plain.tobytes()
        assert adapted("draw:day")[1]["error"]["param"] == "model"  # another tenant's
        [day] = pic.pictures(adapted("draw:day", "acme")[1])
        [copy] = (tmp_path / "store" / "@acme").iterdir()
        (copy / "adapter_model.safetensors").unlink()
        shutil.copy(folder / "third" / "adapter_model.safetensors", copy)
        assert pic.pictures(adapted("draw:day", "acme")[1])[0].tobytes() == day.tobytes(), "loaded"
        said = child.call("POST", "/control/forget_tenant", {"tenant": "acme"})
        assert said == (200, {"forgets": True})
        assert one(child, RED.caption, x_seed=7).tobytes() == plain.tobytes()
        [later] = pic.pictures(adapted("draw:day", "acme")[1])
        assert later.tobytes() == third.tobytes(), "read again"
        status, said = adapted("draw:broken")
        assert (status, said["error"]["code"]) == (400, "adapter_invalid")


@pytest.mark.spec("H5", "F1")
def test_two_owners_of_equal_adapter_files_have_a_slot_each(
    engines: ZygoteUnderTest, drawing: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "adapters"
    for name in ("night", "@acme/night"):
        make_adapter(drawing, folder / name, seed=1)
    given = {"folder": str(folder), "store": str(tmp_path / "store"), "max_rank": 8, "slots": 2}
    with served(engines, "equal", ENTRY, config(drawing, adapters=given, can_sleep=False)) as child:
        drawn = []
        for tenant in ("", "acme", ""):
            body = {"model": "draw:night", "prompt": RED.caption, "x_seed": 7}
            headers = {"content-type": "application/json", messages.TENANT_HEADER: tenant}
            _, answer, connection = pic.send(child, GENERATIONS, json.dumps(body).encode(), headers)
            raw = answer.read()
            connection.close()
            assert answer.status == 200, raw
            drawn += pic.pictures(json.loads(raw))
        assert (tmp_path / "store" / "@acme").is_dir(), "it has its own copy"
        first, own, again = (picture.tobytes() for picture in drawn)
        assert first == own == again != one(child, RED.caption, x_seed=7).tobytes()
        for tenant in ("", "acme"):
            headers = {messages.TENANT_HEADER: tenant}
            told = child.call("POST", messages.ADAPTERS, {"names": ["draw:night"]}, headers)[1]
            assert told["tiers"] == {"draw:night": "hot"}


@pytest.mark.spec("B2")
def test_pictures_are_drawn_only_under_the_dispatch_lock(
    engines: ZygoteUnderTest, drawing: Path
) -> None:
    name = f"draw-{os.getpid()}"
    given = config(drawing, can_sleep=False, dispatch_lock=name)
    with (
        served(engines, "turns", ENTRY, given) as child,
        dispatch_lock.lock_path(name).open("w") as other,
        ThreadPoolExecutor(1) as client,
    ):
        fcntl.flock(other, fcntl.LOCK_EX)
        answer = client.submit(ask, child, RED.caption)
        until(lambda: waits_for_a_lock(child.pid), 60)
        assert not answer.done()
        fcntl.flock(other, fcntl.LOCK_UN)
        assert answer.result(60)[0] == 200
    dispatch_lock.lock_path(name).unlink()


@pytest.mark.spec("L2")
def test_pickled_weights_are_not_loaded(
    engines: ZygoteUnderTest, drawing: Path, tmp_path: Path
) -> None:
    model = tmp_path / "pickled"
    shutil.copytree(drawing, model)
    weights = model / "unet" / "diffusion_pytorch_model.safetensors"
    torch.save({"x": torch.zeros(1)}, weights.with_suffix(".bin"))
    weights.unlink()
    child = engines.spawn(f"pickled-{os.getpid()}", ENTRY, config(model)).hold()
    status, said = child.ready()
    assert status == 500
    assert "safetensors" in said["error"]["message"]
    until(lambda: is_gone(child.pid), 60)


@pytest.mark.spec("H5")
@pytest.mark.parametrize(
    ("make", "takes_negative"),
    [
        (image_models.tiny_sdxl, True),
        (image_models.tiny_sd3, True),
        (image_models.tiny_flux, False),
    ],
    ids=["sdxl", "sd3", "flux"],
)
def test_other_classes_of_pipelines_draw_preview_and_edit(
    engines: ZygoteUnderTest, tmp_path: Path, make: Callable[[Path], Path], takes_negative: bool
) -> None:
    model = make(tmp_path / "model")
    args = {"steps": 4, "guidance": 3.0, "max_pixels": 128 * 128, "vae_tiling": True}
    given = config(model, can_sleep=False) | {"engine_args": args}
    with served(engines, make.__name__, ENTRY, given) as child:
        made = one(child, "anything", x_seed=5, size="128x64")
        assert made.size == (128, 64)
        again = one(child, "anything", x_seed=5, size="128x64")
        assert pic.difference(again, made) <= pic.ROUNDING
        assert pic.difference(made, one(child, "anything", x_seed=6, size="128x64")) > 5
        body = {"model": "draw", "prompt": "x", "stream": True, "partial_images": 1}
        raw = json.dumps(body | {"size": "128x64", "x_seed": 5}).encode()
        _, answer, connection = pic.send(
            child, GENERATIONS, raw, {"content-type": "application/json"}
        )
        events = pic.events(answer.read())
        connection.close()
        assert [pic.picture(data).size for _, data in events] == [(128, 64)] * 2
        fields, red = {"model": "draw", "prompt": "x", "x_seed": 5}, pic.drawn(RED)
        status, body = pic.edit(child, fields, {"image": red, "mask": pic.upper_half()})
        assert status == 200, body
        lower = (0, 32, 64, 64)
        [edited] = pic.pictures(body)
        assert edited.crop(lower).tobytes() == shapes.draw(RED).crop(lower).tobytes()
        assert pic.edit(child, fields, {"image": red})[0] == 200
        status, body = ask(child, "x", x_negative_prompt="y")
        assert (status == 200) == takes_negative


@pytest.mark.spec("L2")
async def test_uploads_of_edits_are_decoded_one_after_the_other(drawing: Path) -> None:
    side = 4096
    decoded_bytes = 4 * side * side  # as Pillow has them, four bytes for each pixel
    engine = module.DiffusersEngine(config(drawing))
    engine.pipeline.limits = Limits(64, 64, 16, 64 * 64, 10, 50, None, True, True, True, True)
    form = Form(files={"image": [pic.png(Image.new("RGB", (side, side), "red"))]})
    fields = ImageFields(prompt="x")
    with growth() as grown:
        asked = (engine._draw_request(fields, form, "", "") for _ in range(4))
        assert [made.setting.width for made in await asyncio.gather(*asked)] == [64] * 4
        assert grown() < 1.75 * decoded_bytes
