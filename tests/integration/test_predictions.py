"""How many bytes and seconds a load will take (A17, A21)."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from arbiter.errors import DeadlineUnmet
from arbiter.units import MIB
from deployments.cli.cluster.model_sources import look
from tests.support.live_arbiter import CONTEXT, LiveArbiter, capability, kill, live_arbiter, model
from tests.support.waits import eventually

pytestmark = pytest.mark.usefixtures("cluster")
OVERHEAD = 128 * MIB  # of an engine that is not in the table of kinds


@pytest.mark.spec("A17", "A21")
async def test_first_load_is_predicted_from_the_bandwidth_that_smaller_models_showed() -> None:
    """50 MiB more take as many seconds again as 50 MiB more took before."""
    sizes = {"a": (50, 0), "b": (100, 5), "c": (150, 0)}
    models = {name: model(mib, load_seconds=took) for name, (mib, took) in sizes.items()}
    async with live_arbiter({"chat": capability(**models)}) as d:
        h = d.holder()
        assert await h.ask.remote("a") == await h.ask.remote("b") == 200
        # Of which the first may be longer than usual, because all of it is new.
        took_s = {e["model"]: e["took_s"] for e in await d.events("model_load")}
        assert took_s["b"] > took_s["a"]
        line_s = pytest.approx(2 * took_s["b"] - took_s["a"], rel=0.01)
        with pytest.raises(DeadlineUnmet) as caught:
            await h.ask.remote("c", deadline_s=2)
        assert caught.value.cause.predicted_s == line_s
        assert "c" not in await d.states()
        assert await h.ask.remote("c", deadline_s=60) == 200
        [load] = [e for e in await d.events("model_load") if e["model"] == "c"]
        assert load["predicted_ns"] / 1e9 == line_s


@pytest.mark.spec("A21")
async def test_deadline_that_the_wait_alone_exceeds_is_refused_at_once_with_the_estimate() -> None:
    """The model in use stays for a minute, and the load of the other takes far less."""
    both = {"chat": capability(a=model(200, load_seconds=1)), "other": capability(b=model(200))}
    async with live_arbiter(both, min_residency_loads=60) as d:
        chat, other = d.holder("chat"), d.holder("other")
        assert await other.ask.remote("b") == 200
        [load] = await d.events("model_load")
        await d.unload("b")
        await chat.keep.remote("a")
        with pytest.raises(DeadlineUnmet) as caught:
            await other.ask.remote("b", deadline_s=30)
        refused = caught.value.cause
        assert load["took_s"] < 30 < refused.predicted_s < 100 and refused.waited_s == 0
        assert await d.states() == {"a": "resident"}
        assert [e["code"] for e in await d.events("ticket_refused")] == ["deadline_unmet"]
        other.ask.remote("b", deadline_s=200)  # which is still queued at the end
        state = await d.until(lambda s: s["queue"])
        assert [q["model"] for q in state["queue"]] == ["b"]


def files_of(folder: Path) -> dict[str, tuple[Path, int]]:
    """A model's source by what says its size, and the bytes of its weights by that."""
    for name in ("headers", "files"):
        (folder / name).mkdir()
    tensors = {"q.weight": np.zeros(5 * MIB, np.float32)}
    save_file(tensors, folder / "headers" / "model.safetensors")
    with (folder / "files" / "model.gguf").open("wb") as file:
        file.truncate(20 * MIB)
    return {
        "headers": (folder / "headers", 20 * MIB),
        "files": (folder / "files", 22 * MIB),
        "name": (folder / "toy-10M", 20_000_000),
    }


async def granted(d: LiveArbiter, holder: Any, name: str) -> int:
    """Bytes that its load was granted. It is asked, and read until its peak is learned."""
    loads = len(await told_of(d, "estimate_error", name))
    assert await holder.ask.remote(name) == 200

    async def is_learned() -> bool:
        return len(await told_of(d, "estimate_error", name)) > loads

    await eventually(is_learned)
    return int((await told_of(d, "ticket_granted", name))[-1]["size_bytes"])


async def measured(d: LiveArbiter, name: str) -> int:
    [ticket] = [t for t in (await d.state())["tickets"] if t["model"] == name]
    return sum(ticket["measured_bytes"].values())


async def told_of(d: LiveArbiter, kind: str, name: str) -> list[dict[str, Any]]:
    return [e for e in await d.events(kind) if e["model"] == name]


@pytest.mark.spec("A17")
async def test_a_size_comes_from_headers_else_files_else_the_name_and_then_from_what_was_measured(
    tmp_path: Path,
) -> None:
    sources = files_of(tmp_path)
    capabilities = {}
    for name, (source, _) in sources.items():
        row = model(30) | {"source": str(source)}
        del row["need"]
        capabilities[name] = capability(**{name: row})
    capabilities["headers"]["models"]["other"] = capabilities["headers"]["models"]["headers"]
    async with live_arbiter(capabilities, 900) as d:
        for name, (_, weights_bytes) in sources.items():
            holder = d.holder(name)
            assert await granted(d, holder, name) == weights_bytes + OVERHEAD
            peak = await measured(d, name)
            if name == "headers":  # the next of its capability has the overhead that was measured
                about_peak = pytest.approx(peak, rel=0.05)
                assert await granted(d, holder, "other") == about_peak != weights_bytes + OVERHEAD
                await new_epoch(d)  # knows it as well
            await d.unload(name)
            assert peak <= await granted(d, holder, name) <= 1.12 * peak, "with some headroom"
        await d.books_are_true()


@pytest.mark.spec("A17")
async def test_size_of_a_hubs_model_is_that_of_its_list_of_files_until_it_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No header can be read there, so files of safetensors count 1.3 times."""
    files = [{"rfilename": f"model-{n}.safetensors", "size": 20 * MIB} for n in (1, 2)]
    said = {"config": {"architectures": ["LlamaForCausalLM"]}, "siblings": files}
    monkeypatch.setattr(httpx, "get", lambda *_, **__: httpx.Response(200, json=said))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    found = look("toy", "none-such/toy")
    assert found.weights_bytes == 52 * MIB
    row = model(80) | {"need": {"weights": found.weights_bytes, "context": CONTEXT}}
    async with live_arbiter({"chat": capability(toy=row)}) as d:
        holder = d.holder()
        assert await granted(d, holder, "toy") == 52 * MIB + CONTEXT
        peak = await measured(d, "toy")
        await d.unload("toy")
        assert 52 * MIB + CONTEXT < peak <= await granted(d, holder, "toy") <= 1.12 * peak
        await d.books_are_true()


async def new_epoch(d: LiveArbiter) -> None:
    """Kills the arbiter, and waits for the next with its books."""
    before = await d.state()
    kill(await d.arbiter_pid())
    tickets = {t["ticket"] for t in before["tickets"]}
    await d.until(
        lambda s: s["epoch"] > before["epoch"] and tickets == {t["ticket"] for t in s["tickets"]}
    )


@pytest.mark.spec("A17")
async def test_an_explicit_size_above_what_was_measured_stays() -> None:
    explicit = 60 * MIB + CONTEXT
    async with live_arbiter({"chat": capability(chat=model(60, bytes=20 * MIB))}) as d:
        holder = d.holder()
        assert await granted(d, holder, "chat") == explicit
        assert await measured(d, "chat") < 60 * MIB
        await d.unload("chat")
        assert await granted(d, holder, "chat") == explicit


@pytest.mark.spec("A17")
async def test_a_learned_peak_above_an_explicit_size_is_what_the_next_load_is_granted() -> None:
    too_low = model(20, bytes=60 * MIB)
    explicit = 20 * MIB + CONTEXT
    async with live_arbiter({"chat": capability(chat=too_low)}) as d:
        holder = d.holder()
        assert await granted(d, holder, "chat") == explicit
        assert not await told_of(d, "explicit_too_low", "chat")
        await d.unload("chat")
        assert await granted(d, holder, "chat") > 60 * MIB
        [told] = await told_of(d, "explicit_too_low", "chat")
        assert told["explicit_bytes"] == explicit and told["size_bytes"] > 60 * MIB
        await d.books_are_true()
