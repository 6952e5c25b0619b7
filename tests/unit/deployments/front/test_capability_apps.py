"""The front deploys each row of its table once, and leaves to Serve what the file has itself."""

from pathlib import Path
from typing import Any

import pytest
from ray.serve import Application
from ray.serve._private.build_app import build_app
from ray.serve._private.config import DeploymentConfig

from deployments import app
from deployments.config.schema import Table, parse_table
from deployments.front.capability_apps import CapabilityApps, Details
from deployments.jobs import server as jobs


class FakeServe:
    """Keeps what it is given as Serve's controller does: it comes back through its wire format."""

    def __init__(self) -> None:
        self.there: dict[str, Details] = {}
        self.ran: list[str] = []

    def applications(self) -> dict[str, Details]:
        return dict(self.there)

    def run(self, applications: dict[str, Application]) -> None:
        for name, one in applications.items():
            [made] = build_app(one, name=name).deployments
            wire = made._deployment_config.to_proto_bytes()
            scaling = DeploymentConfig.from_proto_bytes(wire).autoscaling_config.model_dump()
            self.there[name] = application("imperative", name, autoscaling_config=scaling)
            self.ran.append(name)

    def delete(self, name: str) -> None:
        del self.there[name]


def application(source: str, name: str, **config: Any) -> Details:
    deployments = {name: {"deployment_config": config}}
    return {"source": source, "status": "RUNNING", "deployments": deployments}


def table(**rows: dict[str, Any]) -> Table:
    models = {name: {f"{name}-model": {"source": "x"}} for name in rows}
    plain = {"role": "text", "engine": "vllm"}
    return parse_table(
        {"capabilities": {n: {**plain, "models": models[n], **row} for n, row in rows.items()}}
    )


@pytest.fixture
def fake() -> FakeServe:
    """With the application of jobs deployed, as after any table before."""
    made = FakeServe()
    made.run({jobs.NAME: jobs.application(table())})
    made.ran.clear()
    return made


@pytest.fixture
def apps(fake: FakeServe) -> CapabilityApps:
    return CapabilityApps(fake)


@pytest.mark.spec("M2")
async def test_row_is_deployed_once_by_however_many_fronts(
    apps: CapabilityApps, fake: FakeServe
) -> None:
    first = table(chat={}, rank={"role": "embedding", "class": "rerank"})
    await apps.follow(first)
    await apps.follow(first)
    await CapabilityApps(fake).follow(first)
    assert fake.ran == ["chat", "rank"]
    found = fake.there["rank"]["deployments"]["rank"]["deployment_config"]["autoscaling_config"]
    said = found["policy"]["policy_kwargs"]["class_path"]
    assert said == "deployments.capabilities.rerank:RerankServer"


@pytest.mark.spec("A2")
async def test_new_or_changed_row_is_deployed_alone_and_a_row_that_is_gone_is_deleted(
    apps: CapabilityApps, fake: FakeServe
) -> None:
    await apps.follow(table(chat={}, other={}))
    await apps.follow(table(chat={"keep_warm_s": 5}, new={}))  # which is the arbiter's to know
    assert fake.ran == ["chat", "other", "new"]
    assert fake.there.keys() == {"chat", "new", "jobs"}
    await apps.follow(table(chat={"max_replicas": 2}, new={}))
    assert fake.ran[3:] == ["chat"]


OWN = """from deployments.capabilities.text import TextServer


class Own(TextServer):
    answer = {answer}
"""


@pytest.mark.spec("M2")
async def test_changed_code_of_a_class_deploys_its_row_again(
    apps: CapabilityApps, fake: FakeServe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own_text.py"
    file.write_text(OWN.format(answer=1))
    monkeypatch.syspath_prepend(tmp_path)
    rows = table(chat={}, own={"class": "own_text:Own"})
    await apps.follow(rows)
    await apps.follow(rows)
    file.write_text(OWN.format(answer=2))
    await apps.follow(rows)
    assert fake.ran == ["chat", "own", "own"]
    file.unlink()
    await apps.follow(rows)
    assert fake.ran[3:] == [] and "cannot be read" in apps.causes["own"]


@pytest.mark.spec("M2")
async def test_changed_options_of_deployments_deploy_every_row_again(
    apps: CapabilityApps, fake: FakeServe, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = table(chat={}, other={})
    await apps.follow(rows)
    monkeypatch.setitem(app.OPTIONS, "max_queued_requests", 5)
    await apps.follow(rows)
    assert fake.ran == ["chat", "other"] * 2


async def test_application_of_the_file_and_what_others_run_stay_as_they_are(
    apps: CapabilityApps, fake: FakeServe
) -> None:
    theirs = {
        "chat": application("declarative", "chat"),
        "of the file": application("declarative", "of the file"),
        "of a notebook": application("imperative", "of a notebook"),
    }
    before = fake.there | theirs
    fake.there = dict(before)
    await apps.follow(table(chat={}))
    assert fake.ran == [] and fake.there == before


@pytest.mark.parametrize(
    ("source", "status", "ran"),
    [
        ("declarative", "DELETING", ["chat"]),
        ("imperative", "DEPLOY_FAILED", ["chat"]),
        ("declarative", "DEPLOY_FAILED", []),
    ],
    ids=["leaves with the file", "failed", "of the file and failed"],
)
async def test_row_is_deployed_again_unless_the_file_has_its_application(
    apps: CapabilityApps, fake: FakeServe, source: str, status: str, ran: list[str]
) -> None:
    fake.there["chat"] = application(source, "chat") | {"status": status}
    await apps.follow(table(chat={}))
    assert fake.ran == ran


@pytest.mark.spec("J9")
async def test_module_of_a_class_that_is_no_python_costs_its_row_alone(
    apps: CapabilityApps,
    fake: FakeServe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "misspelt.py").write_text("class Patient(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    await apps.follow(table(sick={"class": "misspelt:Patient"}, chat={}))
    assert fake.ran == ["chat"] and "SyntaxError" in apps.causes["sick"]


@pytest.mark.spec("J9")
async def test_row_that_cannot_be_built_keeps_its_cause_and_the_others_are_deployed(
    apps: CapabilityApps, fake: FakeServe
) -> None:
    await apps.follow(table(sick={"class": "none:Patient"}, chat={}))
    assert fake.ran == ["chat"]
    assert "No module named 'none'" in apps.causes["sick"]
    await apps.follow(table(sick={}, chat={}))
    assert (apps.causes, fake.ran) == ({}, ["chat", "sick"])


def test_class_is_the_roles_unless_the_row_has_paths_or_names_one() -> None:
    rows = table(
        chat={}, echo={"paths": ["/v1/echo"]}, rank={"class": "rerank"}, own={"class": "a.b:C"}
    ).capabilities
    assert {name: app.class_path(row) for name, row in rows.items()} == {
        "chat": app.CLASSES["text"], "echo": None, "rank": app.CLASSES["rerank"], "own": "a.b:C",
    }  # fmt: skip


@pytest.mark.spec("J4")
async def test_jobs_are_deployed_once_for_each_state_file() -> None:
    fake = FakeServe()
    for state_file in (None, None, "/state/arbiter.sqlite", "/state/arbiter.sqlite"):
        plain = {"arbiter": {"state_file": state_file}, "capabilities": {}}
        await CapabilityApps(fake).follow(parse_table(plain))
    assert fake.ran == ["jobs", "jobs"]
