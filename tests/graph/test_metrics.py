"""The running graph's metrics: at the front, and on Ray's own exporter."""

import json
import re
import tempfile
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai import OpenAI
from ray._common.utils import get_default_ray_temp_dir

from arbiter.metrics.table import FRONT, TABLE, MetricType
from tests.graph.conftest import Graph, until
from tests.support.graph_commands import read_command
from tests.support.graph_metrics import ray_answer, ray_samples, scrape

CHAT = "tiny-chat"
HELLO = [{"role": "user", "content": "Who holds the memory?"}]
NAMES = re.compile(r"\b(?:ray_)?arbiter_\w+")
REQUEST = "request-of-the-labels"
REPORT_S = 10.0  # of Ray's metrics; ours are set each 5 s


@dataclass(frozen=True)
class Asked:
    adapter: str
    tickets: set[str]  # there were then
    counted: float  # requests before these two


@pytest.fixture(scope="module")
def asked(graph: Graph) -> Asked:
    """An adapter and then a model have answered; all wait together for Ray's next reports."""
    client = OpenAI(base_url=f"{graph.url}/v1", api_key="none", timeout=120, max_retries=0)
    adapter = next(m.id for m in client.models.list() if m.id.startswith("small-chat:"))
    hello: Any = HELLO
    before = answered("arbiter_request_seconds_count", scrape(f"{graph.url}/metrics"))
    client.chat.completions.create(
        model=adapter, messages=hello, max_tokens=2, extra_headers={"x-request-id": REQUEST}
    )
    tickets = {t["ticket"] for t in graph.state()["tickets"]}
    client.chat.completions.create(model=CHAT, messages=hello, max_tokens=2)
    return Asked(adapter, tickets, before)


def answered(name: str, found: dict[str, list[Any]]) -> float:
    samples = found.get(name, [])
    what = {"capability": "chat", "outcome": "answered"}
    return sum(s.value for s in samples if s.labels.items() >= what.items())


@pytest.mark.spec("K2")
def test_a_request_is_counted_at_the_front_and_on_rays_exporter(graph: Graph, asked: Asked) -> None:
    page, before = f"{graph.url}/metrics", asked.counted
    until(
        lambda: answered("arbiter_request_seconds_count", scrape(page)) >= before + 2,
        60,
        "heartbeats have brought both requests",
    )
    found = scrape(page)
    assert found["arbiter_up"][0].value == 1
    states = {s.labels["model"]: s.value for s in found["arbiter_model_state"]}
    assert states[CHAT] >= 1
    plain = {
        m.name for m in TABLE.values() if m.kind is not MetricType.HISTOGRAM and m not in FRONT
    }

    def has_all(rays: dict[str, list[Any]]) -> bool:
        """Looks anew each time, because some have no series now and then. Ray drops what is
        infinite: a bound that no person has set."""
        of_ray = {name.removeprefix("ray_") for name in rays if name.startswith("ray_arbiter_")}
        is_counted = answered("ray_arbiter_request_seconds_count", rays) >= before + 2
        shown = {
            n for n, samples in scrape(page).items() if any(isfinite(s.value) for s in samples)
        }
        return is_counted and plain & shown <= of_ray

    def is_exported() -> bool:
        return has_all(ray_samples(graph))

    until(is_exported, 6 * REPORT_S, "Ray exports both requests, and all that the front shows")


@pytest.mark.spec("K2")
def test_no_label_of_either_exporter_names_an_adapter_a_request_or_a_ticket(
    graph: Graph, asked: Asked
) -> None:
    assert asked.tickets

    def ours() -> dict[str, list[Any]]:
        """The samples of our metrics, at the front and at Ray's exporter."""
        found = scrape(f"{graph.url}/metrics") | ray_samples(graph)
        return {name: samples for name, samples in found.items() if NAMES.match(name)}

    def both_know_it() -> dict[str, list[Any]]:
        """Of an adapter that was used, both have the counts."""
        samples = ours()
        counted = {
            name
            for name in ("arbiter_pool_rows", "ray_arbiter_pool_rows")
            for sample in samples.get(name, ())
            if sample.labels.get("content") == "adapter" and sample.value > 0
        }
        return samples if len(counted) == 2 else {}

    found = until(both_know_it, 6 * REPORT_S, "both exporters count the adapter's rows")
    every = [sample for samples in found.values() for sample in samples]
    labels = {label for sample in every for label in sample.labels}
    values = {value for sample in every for value in sample.labels.values()}
    assert {"model", "capability"} <= labels and "small-chat" in values
    assert not labels & {"adapter", "request", "request_id", "ticket"}
    tickets = asked.tickets | {t["ticket"] for t in graph.state()["tickets"]}
    names = {asked.adapter, asked.adapter.partition(":")[2], REQUEST}
    assert not values & (tickets | names)


@pytest.mark.spec("K5")
def test_rays_grafana_is_given_a_dashboard_of_what_rays_exporter_shows(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ray configures Grafana; a Grafana is not at hand."""
    session = ray_answer(graph, "/api/version")["session_name"]
    root = Path(get_default_ray_temp_dir(), session, "metrics")
    monkeypatch.setenv("RAY_METRICS_OUTPUT_ROOT", str(root))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(read_command(graph, "metrics", "install", folder, "--ray")["files"][-1])
    provisioning = root / "grafana" / "provisioning" / "dashboards" / "default.yml"
    [provider] = yaml.safe_load(provisioning.read_text())["providers"]
    assert path.parent == Path(provider["options"]["path"])
    assert any(path.parent.glob("serve*_grafana_dashboard.json")), "beside Ray's own"
    panels = json.loads(path.read_text())["panels"]
    asked = {n for p in panels for t in p["targets"] for n in NAMES.findall(t["expr"])}
    known = {f"ray_{m.name}" for m in TABLE.values() if m not in FRONT}
    parts = {f"{name}_{part}" for name in known for part in ("bucket", "sum", "count")}
    assert asked <= known | parts
    of_devices = {n for n in asked if n.startswith("ray_arbiter_device_")}
    assert of_devices

    def is_exported() -> bool:
        return of_devices <= ray_samples(graph).keys()

    until(is_exported, 6 * REPORT_S, "Ray exports what the panels of devices ask for")


@pytest.mark.spec("K5")
def test_rays_dashboard_tells_what_each_replica_holds_and_what_the_arbiter_has_lent(
    graph: Graph, client: OpenAI
) -> None:
    """Among its events, once for each change."""

    def told() -> list[str]:
        rows = ray_answer(graph, "/events")["data"]["events"]["global"]
        return [row["message"] for row in rows]

    def has(begin: str, *words: str) -> bool:
        return any(m.startswith(begin) and all(w in m for w in words) for m in told())

    client.chat.completions.create(model=CHAT, messages=HELLO, max_tokens=2)
    until(
        lambda: has("chat#", f"{CHAT} (resident, ", f" on {graph.node}/cpu:0)"), 20, "it holds it"
    )
    until(
        lambda: has("The arbiter has lent", f"of {graph.node}/cpu:0 to"), 20, "and it has lent it"
    )


@pytest.mark.spec("K5")
def test_rays_dashboard_names_the_arbiter_the_agents_and_each_replica_by_its_application(
    graph: Graph, client: OpenAI
) -> None:
    client.chat.completions.create(model=CHAT, messages=HELLO, max_tokens=2)
    rows = ray_answer(graph, "/logical/actors")["data"]["actors"].values()
    alive = [row for row in rows if row["state"] == "ALIVE"]
    names = [row["reprName"] or row["name"] for row in alive]
    for begin in ("Arbiter(", "NodeAgent(", "SERVE_REPLICA::front#", "SERVE_REPLICA::chat#"):
        assert any(name.startswith(begin) for name in names), (begin, names)
