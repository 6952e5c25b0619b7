"""Adapters by name through the whole graph, with the official client."""

import json
import os
import shutil
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import BadRequestError, InternalServerError, NotFoundError, OpenAI

from deployments.config.environment import Environment
from deployments.front.access import keys
from deployments.front.access.keys import Scope
from models.make_models import TINY, default_folder, make
from tests.graph.conftest import BUCKET_KEY, HUB_ORG, Graph, s3_port, until
from tests.support import s3_server
from tests.support.graph_commands import drain, read_command, send, unload_all
from tests.support.graph_processes import logs_naming

CHAT, EYES = "tiny-chat", "tiny-describe"
WITHIN_S = 60


@pytest.fixture
def adapters(graph: Graph) -> Iterator[Path]:
    """The folder the running system looks in; empty before and after."""
    folder = Path(graph.table["capabilities"]["chat"]["models"][CHAT]["adapters"]["folder"])
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def dropped(folder: Path, name: str, weights: str = "a1") -> Path:
    """A good adapter, there all at once."""
    source = make(default_folder(), TINY).with_name(f"{TINY.name}-adapters")
    shutil.copytree(source / weights, folder.parent / name)
    target = folder / name
    (folder.parent / name).rename(target)
    return target


def said(client: OpenAI, model: str, **headers: str) -> tuple[str, str]:
    answer = client.completions.create(
        model=model, prompt="The arbiter holds", max_tokens=12, temperature=0, extra_headers=headers
    )
    return answer.model, answer.choices[0].text


@pytest.mark.spec("F2", "J1")
def test_dropped_adapter_is_called_by_its_names_and_a_corrupt_one_fails_alone(
    client: OpenAI, adapters: Path
) -> None:
    base = said(client, CHAT)
    with pytest.raises(NotFoundError):
        said(client, "law-v1")
    dropped(adapters, "law-v1")
    asked, text = said(client, f"{CHAT}:law-v1")
    assert asked == f"{CHAT}:law-v1" and text != base[1]
    assert said(client, "law-v1")[1] == text
    assert f"{CHAT}:law-v1" in {model.id for model in client.models.list()}
    with pytest.raises(NotFoundError, match="law-v1"):
        said(client, "law-v2")
    (dropped(adapters, "torn") / "adapter_model.safetensors").write_bytes(b"\xff" * 999)
    with pytest.raises(BadRequestError, match="torn") as refused:
        said(client, "torn")
    assert refused.value.code == "adapter_invalid"
    assert said(client, CHAT) == base and said(client, "law-v1")[1] == text


@pytest.mark.spec("F2", "C2")
def test_entry_of_an_adapter_says_how_urgent_its_requests_are(
    graph: Graph, client: OpenAI, adapters: Path
) -> None:
    """As the events of loads tell it. The engine's order is by the same number."""
    (dropped(adapters, "dear") / "serve.json").write_text(json.dumps({"priority": "high"}))
    for name, priority in (("dear", "high"), (CHAT, "normal")):
        until(lambda: unload_all(graph), WITHIN_S, "all has left")
        began = graph.state()["sequence"]
        said(client, name)
        queued = [e for e in graph.events() if e["seq"] > began and e["kind"] == "ticket_queued"]
        # After a transcription the pipeline loads the voice behind the chat ahead.
        assert [e["priority"] for e in queued if e["model"] == CHAT] == [priority]


@pytest.mark.spec("F2", "J1")
def test_folder_with_the_name_of_a_model_is_no_adapter(client: OpenAI, adapters: Path) -> None:
    base = said(client, CHAT)
    for name in (CHAT, EYES):
        dropped(adapters, name)
        with pytest.raises(NotFoundError):
            said(client, f"{CHAT}:{name}")
    assert said(client, CHAT) == base
    listed = [model.id for model in client.models.list()]
    assert listed.count(CHAT) == listed.count(EYES) == 1
    assert not {f"{CHAT}:{CHAT}", f"{CHAT}:{EYES}"} & {*listed}


@pytest.mark.spec("F2", "J1")
def test_adapter_that_comes_into_a_folder_of_ten_thousand_is_called_at_once(
    client: OpenAI, adapters: Path
) -> None:
    first = dropped(adapters, "first")
    for number in range(10_000):
        (other := adapters / f"other-{number}").mkdir()
        for file in first.iterdir():
            os.link(file, other / file.name)
    text = said(client, "first")[1]
    assert text != said(client, CHAT)[1]
    dropped(adapters, "late")
    assert said(client, f"{CHAT}:late") == (f"{CHAT}:late", text)
    assert said(client, "other-9999")[1] == text
    listed = [model.id for model in client.models.list()]
    assert len([name for name in listed if name.startswith(f"{CHAT}:other-")]) == 10_000
    shutil.rmtree(adapters / "late")
    with pytest.raises(NotFoundError):
        said(client, "late")


@pytest.mark.spec("E1", "E7", "F3", "K4")
def test_adapter_outlives_a_killed_engine_and_the_command_shows_its_tier(
    graph: Graph, client: OpenAI, adapters: Path
) -> None:
    dropped(adapters, "kept")
    first = said(client, "kept")
    for pid in graph.engines():
        os.kill(pid, signal.SIGKILL)
    until(lambda: not graph.engines(), WITHIN_S, "the engines have ended")
    until(lambda: is_idle(tiers(graph)), WITHIN_S, "idle, the slab has its image")
    before = tiers(graph)
    until(lambda: tier_of(graph, "kept") == "", WITHIN_S, "no engine is there to name the images")
    assert said(client, "kept") == first
    until(lambda: tiers(graph)["found warm"] > before["found warm"], WITHIN_S, "it was warm")
    dropped(adapters, "unused")

    def is_told() -> bool:
        """Asked again, so that its engine does not leave before what is shown was read anew."""
        assert said(client, "kept") == first
        tier = {name: tier_of(graph, name) for name in ("kept", "unused")}
        is_so = tiers(graph)["hot"] == 1 and tier == {"kept": "hot", "unused": "cold"}
        return is_so and told_by_command(graph) == tiers(graph)

    until(is_told, WITHIN_S, "it has a slot, and the tiers are told")
    assert tiers(graph)["found cold"] == before["found cold"]


@pytest.mark.spec("E6")
def test_adapter_of_a_removed_tenant_leaves_its_slot_and_the_disk_and_the_folder_keeps_it(
    graph: Graph, client: OpenAI, adapters: Path
) -> None:
    """The tenant of all requests without a key."""
    (adapters / "@default").mkdir()
    mine = dropped(adapters / "@default", "mine")
    copies = Environment().adapters / "@default"
    first = said(client, "mine")
    assert list(copies.iterdir())
    until(lambda: tiers(graph)["hot"] == 1, WITHIN_S, "it has a slot")
    send(graph, "DELETE", "/arbiter/tenants/default/kept")
    until(lambda: tiers(graph)["hot"] == 0, WITHIN_S, "its slot is empty")
    until(lambda: not copies.exists(), WITHIN_S, "the copy on the disk has left")
    assert mine.is_dir() and said(client, "mine") == first


def is_idle(found: dict[str, int]) -> bool:
    """The agent has seen that the engine has ended."""
    return found["hot"] == 0 and found["warm"] >= 1


def tiers(graph: Graph) -> dict[str, int]:
    """Of the model's adapters, as the command counts them."""
    owned = [s["slab"] for s in graph.state()["slabs"] if s["slab"]["owner"] == f"chat/{CHAT}"]
    rows = [
        {
            "hot": row["hot_count"],
            "warm": max(0, row["rows_count"] - row["hot_count"]),
            "found hot": row["hot_hits_count"],
            "found warm": row["hits_count"],
            "found cold": row["misses_count"],
        }
        for row in owned
        if row["content"] == "adapter"
    ]
    return max(rows, key=lambda row: sum(row[name] for name in row if name.startswith("found")))


def told_by_command(graph: Graph) -> dict[str, int]:
    """The tiers, and none that the command alone counts."""
    rows = [row for row in read_command(graph, "adapters") if row["model"] == CHAT]
    row = max(rows, key=lambda row: sum(row["requests"].values()))
    told = row["adapters"] | {f"found {tier}": n for tier, n in row["requests"].items()}
    assert told.pop("cold") >= 1
    return told


def tier_of(graph: Graph, name: str) -> str:
    """As console and `arbiter top` are told; empty: it is not known."""
    said = send(graph, "GET", f"/arbiter/view/adapters?search={CHAT}:{name}")
    assert said["adapters"] == [f"{CHAT}:{name}"]
    return str(said["tiers"].get(f"{CHAT}:{name}", ""))


@pytest.mark.spec("D5", "F7")
def test_adapter_that_takes_all_requests_is_merged_into_a_copy_and_leaves_it_when_replaced(
    graph: Graph, client: OpenAI, adapters: Path
) -> None:
    dropped(adapters, "hot")
    name, copy = f"{CHAT}:hot", f"{CHAT}+merged"
    in_slot = said(client, name)

    def answered_by_the_copy() -> bool:
        assert said(client, name)[0] == name
        return copy in answering(graph)

    until(answered_by_the_copy, WITHIN_S, "a copy answers")
    # Weights rounded to bfloat16 with the adapter in them are near those with it beside: how many
    # tokens of random weights are the same depends on the processor. Closer: the golden tests.
    answered, merged = said(client, name)
    assert (answered, merged[:1]) == (name, in_slot[1][:1]) and merged != said(client, CHAT)[1]
    assert copy not in {model.id for model in client.models.list()}, "it has no name of its own"
    weights = adapters / "hot" / "adapter_model.safetensors"
    other = make(default_folder(), TINY).with_name(f"{TINY.name}-adapters") / "a2"
    shutil.copytree(other, adapters / "hot", dirs_exist_ok=True)
    assert weights.read_bytes() == (other / weights.name).read_bytes()
    changed = said(client, name)
    assert changed != in_slot
    until(lambda: copy not in resident(graph), WITHIN_S, "the copy has left")
    assert said(client, name) == changed


@pytest.mark.spec("F7")
def test_copy_that_finds_no_room_is_refused_and_its_adapter_answers_on_in_its_slot(
    graph: Graph, client: OpenAI, adapters: Path
) -> None:
    dropped(adapters, "crowded")
    name, copy = f"{CHAT}:crowded", f"{CHAT}+merged"
    until(lambda: unload_all(graph), WITHIN_S, "all has left")
    in_slot, began = said(client, name), graph.state()["sequence"]
    [cpu] = [d for d in graph.state()["devices"] if d["kind"] == "cpu"]
    body = {"gb": (cpu["free_bytes"] - (64 << 20)) / (1 << 30), "term_s": 300}
    held = send(graph, "POST", "/arbiter/free", body)
    try:
        assert held["lease"]["state"] == "held"

        def refused() -> bool:
            assert said(client, name) == in_slot
            return "ticket_refused" in kinds(graph, copy, began)

        until(refused, WITHIN_S, "its copy is refused")
        assert said(client, name) == in_slot
        assert not kinds(graph, copy, began) & {"ticket_granted", "model_load", "capability_run"}
        assert CHAT in resident(graph), "nothing has left for it"
    finally:
        drain(graph, held["lease"]["ticket"])


def kinds(graph: Graph, model: str, after: int) -> set[str]:
    """Of the events of a model's tickets since then."""
    told = [e for e in graph.events() if e["seq"] > after]
    tickets = {e["ticket"] for e in told if e["kind"] == "ticket_queued" and e["model"] == model}
    return {e["kind"] for e in told if e.get("ticket") in tickets}


def answering(graph: Graph) -> set[str]:
    """The models of which the log says that they have answered a request."""
    return {e["model"] for e in graph.events() if e["kind"] == "capability_run"}


def resident(graph: Graph) -> set[str]:
    return {t["model"] for t in graph.state()["tickets"] if t["state"] == "resident"}


@pytest.mark.spec("F2", "L2")
def test_adapter_behind_an_allowed_url_is_called_by_name_and_no_other_url_is_opened(
    client: OpenAI, adapters: Path
) -> None:
    elsewhere = adapters.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    dropped(elsewhere, "law-v1")
    dropped(adapters, "near")
    rows = {"far": f"file://{elsewhere}/law-v1/", "theirs": "file:///etc/"}
    (adapters / "remote.json").write_text(json.dumps(rows))
    assert said(client, "far")[1] == said(client, "near")[1] != said(client, CHAT)[1]
    with pytest.raises(BadRequestError, match=r"adapters\.urls"):
        said(client, "theirs")
    assert f"{CHAT}:far" in {model.id for model in client.models.list()}


@pytest.mark.spec("F2", "L2")
def test_adapter_in_a_bucket_is_called_by_name_and_answers_as_from_a_folder(
    graph: Graph, client: OpenAI, adapters: Path
) -> None:
    """By s3fs, with the credentials of the environment in which the system was started, and among
    10,000 others."""
    near, mark = said(client, dropped(adapters, "near").name)[1], uuid.uuid4().hex
    bucket = f"s3://{s3_server.BUCKET}/{mark}"  # what came from a URL once is not asked for again
    rows = {"far": f"{bucket}/far/", "late": f"{bucket}/late/", "theirs": f"s3://theirs/{mark}/"}
    rows |= {f"other-{n}": f"{bucket}/other-{n}/" for n in range(10_000)}
    with s3_server.s3_server(graph.folder / "moto.log", s3_port()) as server:
        server.upload(adapters / "near", f"{mark}/far")
        (adapters / "remote.json").write_text(json.dumps(rows))
        assert said(client, "far")[1] == near != said(client, CHAT)[1]
        with pytest.raises(BadRequestError, match=r"adapters\.urls"):
            said(client, "theirs")
        with pytest.raises(InternalServerError, match="upload the adapter's files") as refused:
            said(client, "late")
        assert (refused.value.status_code, refused.value.code) == (502, "adapter_not_fetched")
        server.upload(adapters / "near", f"{mark}/late")
        assert said(client, f"{CHAT}:late")[1] == near
    asked = (graph.folder / "moto.log").read_text()
    assert mark in asked and f"/theirs/{mark}" not in asked
    assert said(client, "far")[1] == near, "the server has ended, what it gave is there"
    assert not logs_naming(graph, BUCKET_KEY[1])


@pytest.mark.spec("F2")
def test_adapter_of_a_hub_that_may_not_be_asked_says_how_it_may(
    graph: Graph, client: OpenAI, adapters: Path
) -> None:
    rows = {"hubs": f"hf://{HUB_ORG}/{uuid.uuid4().hex}/"}
    (adapters / "remote.json").write_text(json.dumps(rows))
    with pytest.raises(InternalServerError, match="HF_HUB_OFFLINE=0") as refused:
        said(client, "hubs")
    assert refused.value.code == "adapter_not_fetched"


@pytest.mark.spec("F2", "L2")
def test_adapter_of_another_tenant_is_not_found_whatever_tenant_a_header_names(
    client: OpenAI, adapters: Path
) -> None:
    (adapters / "@acme").mkdir()
    dropped(adapters, "secret").rename(adapters / "@acme" / "secret")
    for name in ("secret", f"{CHAT}:secret"):
        with pytest.raises(NotFoundError):
            said(client, name, **{"x-arbiter-tenant": "acme"})
    assert f"{CHAT}:secret" not in {model.id for model in client.models.list()}


@pytest.mark.spec("F2", "L1", "L2")
def test_adapters_of_one_name_are_each_tenants_own_and_hide_the_common_one(
    client: OpenAI, adapters: Path, keys_file: Path
) -> None:
    common = said(client, dropped(adapters, "law", "a0").name)
    answers = {}
    for tenant, weights in (("ann", "a1"), ("bob", "a2")):
        (adapters / f"@{tenant}").mkdir()
        dropped(adapters, f"of-{tenant}", weights).rename(adapters / f"@{tenant}" / "law")
        own = client.with_options(
            api_key=keys.add(keys_file, tenant, tenant, frozenset({Scope.INFER}))
        )
        answers[tenant] = said(own, "law")
        assert said(own, f"{CHAT}:law") == (f"{CHAT}:law", answers[tenant][1])
        shutil.rmtree(adapters / f"@{tenant}" / "law")
        assert said(own, "law") == common, "its own has gone"
    assert len({common[1], *(text for _, text in answers.values())}) == 3
