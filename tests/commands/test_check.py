"""`arbiter check` builds what a file names: what passes deploys, and what does not is named."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from arbiter.core.records.estimates import Estimates, ModelKey
from arbiter.core.settings import DEFAULTS
from arbiter.server.store import Store
from arbiter.units import GIB, Bytes, seconds
from deployments.app import CLASSES
from deployments.config.config_file import check_file
from deployments.config.load_plan import plan
from tests.support.command_line import Run

ROOT = Path(__file__).parents[2]
SHIPPED = ("serve_config.yaml", "serve_config.gpu.yaml", "serve_config.gpu80.yaml")
Config = dict[str, Any]


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders where the made models are looked for, with one small matrix in each."""
    named = "".join((ROOT / name).read_text() for name in SHIPPED)
    for name in set(re.findall(r"made:([\w.-]+)", named)):
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        save_file({"q.weight": np.zeros((8, 8), np.float32)}, folder / "model.safetensors")
    monkeypatch.setenv("ARBITER_MODELS", str(tmp_path / "models"))


def shipped(name: str = "serve_config.gpu.yaml") -> Config:
    config: Config = yaml.safe_load((ROOT / name).read_text())
    return config


def with_applications() -> Config:
    """With an application of its own for each capability, as a person may have written them."""
    config = shipped()
    for name in config["applications"][0]["deployments"][0]["user_config"]["capabilities"]:
        policy = {
            "policy_function": "deployments.scaling:ArbiterPolicy",
            "policy_kwargs": {"capability": name},
        }
        config["applications"].append(
            {
                "name": name,
                "route_prefix": None,
                "import_path": "deployments.app:capability",
                "args": {"capability": name},
                "autoscaling_policy": policy,
                "deployments": [{"name": name}],
            }
        )
    chat(config)["args"]["class"] = CLASSES["text"]
    return config


def written(config: Config, tmp_path: Path) -> Path:
    file = tmp_path / "serve_config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


@pytest.mark.spec("H0")
@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_configuration_is_good(name: str) -> None:
    """As a person runs it, in a process of its own and without a cluster."""
    words = ["-m", "deployments.cli", "check", str(ROOT / name)]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    table = check_file(ROOT / name)
    good, head, *rows = done.stdout.splitlines()
    assert good == f"{ROOT / name}: good, {len(table.homes)} models"
    assert head.startswith("model")
    assert {row.split()[0] for row in rows} == set(table.homes)


def test_what_models_need_is_there_for_programs(run: Run) -> None:
    done = run("check", str(ROOT / SHIPPED[1]), "--json")
    report = json.loads(done.stdout)
    assert report["ok"] is True
    [written_need] = re.findall(
        r"qwen3-8b:.*?need: {(.*?)}", (ROOT / SHIPPED[1]).read_text(), re.S
    )[:1]
    parts = [float(part) for part in re.findall(r"([\d.]+) GiB", written_need)]
    assert len(parts) == 4
    assert report["need_bytes"]["qwen3-8b"] == sum(round(part * GIB) for part in parts)


@pytest.mark.spec("H0")
def test_a_policy_without_its_arguments_is_refused_as_serve_would(run: Run, tmp_path: Path) -> None:
    """serve_config.gpu.yaml was shipped so, and failed only when it was deployed."""
    config = with_applications()
    for app in config["applications"][1:]:
        del app["autoscaling_policy"]["policy_kwargs"]
    file = written(config, tmp_path)
    failed = run("check", str(file))
    assert (failed.exit_code, failed.stdout) == (1, "")
    head, *problems = failed.stderr.splitlines()
    assert head == f"arbiter check: {file} must not be deployed:"
    for app, problem in zip(config["applications"][1:], problems, strict=True):
        assert problem.startswith(f"applications.{app['name']}.autoscaling_policy.policy_kwargs: ")
        assert problem.endswith("missing 1 required positional argument: 'capability'")
    asked = run("check", str(file), "--json")
    assert asked.exit_code == 1
    assert json.loads(asked.stdout) == {"ok": False, "problems": problems}


def chat(config: Config) -> Config:
    app: Config = config["applications"][1]
    return app


def policy(config: Config) -> Config:
    found: Config = chat(config)["autoscaling_policy"]
    return found


PLACE = "applications.chat."
WRONG: dict[str, tuple[Callable[[Config], Any], str, str]] = {
    "no such module": (
        lambda c: chat(c).update(import_path="deployments.nowhere:text"),
        PLACE + "import_path: deployments.nowhere:text: ", "No module named",
    ),
    "no such builder": (
        lambda c: chat(c).update(import_path="deployments.app:painter"),
        PLACE + "import_path: deployments.app:painter: ", "painter",
    ),
    "not a builder": (
        lambda c: chat(c).update(import_path="deployments.app:LOGGING"),
        PLACE + "args: deployments.app:LOGGING: ", "Serve application",
    ),
    "an argument it does not know": (
        lambda c: chat(c)["args"].update(capabilty="chat"),
        PLACE + "args: deployments.app:capability: capabilty: ", "not permitted",
    ),
    "no such deployment": (
        lambda c: chat(c)["deployments"][0].update(name="chart"),
        PLACE + "deployments.chart: ", "does not exist. Available: ['chat']",
    ),
    "an option of a wrong value": (
        lambda c: chat(c)["deployments"][0].update(autoscaling_config={"min_replicas": -1}),
        PLACE + "deployments.chat", "min_replicas",
    ),
    "no such policy": (
        lambda c: policy(c).update(policy_function="deployments.scaling:Policy"),
        PLACE + "autoscaling_policy.policy_function: deployments.scaling:Policy: ", "Policy",
    ),
    "a key of the policy that Serve would drop": (
        lambda c: policy(c).update(policy_kwarg={}),
        PLACE + "autoscaling_policy: ", "unknown key 'policy_kwarg'",
    ),
    "an argument that the policy does not know": (
        lambda c: policy(c)["policy_kwargs"].update(model="m"),
        PLACE + "autoscaling_policy.policy_kwargs: ", "'model'",
    ),
    "the policy of another capability": (
        lambda c: policy(c)["policy_kwargs"].update(capability="embedding"),
        PLACE + "autoscaling_policy.policy_kwargs.capability: 'embedding'", "serves 'chat'",
    ),
    "a policy of a deployment": (
        lambda c: chat(c)["deployments"][0].update(
            autoscaling_config={"policy": {"policy_function": "deployments.scaling:ArbiterPolicy"}}
        ),
        PLACE + "deployments.chat.autoscaling_config.policy.policy_kwargs: ", "'capability'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_would_fail_when_it_deploys_is_named_by_its_key(
    what: str, run: Run, tmp_path: Path
) -> None:
    change, place, says = WRONG[what]
    config = with_applications()
    change(config)
    failed = run("check", str(written(config, tmp_path)), "--json")
    assert failed.exit_code == 1
    [problem] = json.loads(failed.stdout)["problems"]
    assert problem.startswith(place) and says in problem


@pytest.mark.parametrize(
    ("said", "names"),
    [("painter", "no 'painter'; there is: text, "), ("none:Patient", "No module named 'none'")],
)
def test_class_of_a_row_that_cannot_be_deployed_is_named(
    said: str, names: str, run: Run, tmp_path: Path
) -> None:
    config = shipped()
    table = config["applications"][0]["deployments"][0]["user_config"]
    table["capabilities"]["asr"]["class"] = said
    failed = run("check", str(written(config, tmp_path)), "--json")
    [problem] = json.loads(failed.stdout)["problems"]
    assert problem.startswith("front.user_config.capabilities.asr.class") and names in problem


def test_a_router_that_is_not_there_is_named(run: Run, tmp_path: Path) -> None:
    config = with_applications()
    wrong = {"request_router_class": "deployments.routing.router:Router"}
    chat(config)["deployments"][0]["request_router_config"] = wrong
    failed = run("check", str(written(config, tmp_path)))
    assert failed.exit_code == 1
    assert "has no attribute 'Router'" in failed.stderr


def test_a_model_whose_files_are_not_there_is_named_and_so_are_the_others(
    run: Run, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "models")
    failed = run("check", str(ROOT / SHIPPED[0]))
    assert failed.exit_code == 1
    lines = failed.stderr.splitlines()[1:]
    made = re.findall(r"made:([\w.-]+)", (ROOT / SHIPPED[0]).read_text())
    assert {"small-chat", "tiny-draw"} <= set(made)
    for model, line in zip(made, lines, strict=True):
        assert line.startswith("front.user_config.capabilities.")
        assert f".models.{model}: " in line
        assert "make models" in line


def test_every_key_that_the_schema_refuses_is_a_line(run: Run, tmp_path: Path) -> None:
    config = shipped()
    table = config["applications"][0]["deployments"][0]["user_config"]
    table["arbiter"] |= {"evct": "x", "bypass_count": -1}
    failed = run("check", str(written(config, tmp_path)), "--json")
    problems = json.loads(failed.stdout)["problems"]
    assert {p.split("front.user_config.")[1].split(":")[0] for p in problems} == {
        "arbiter.evct", "arbiter.bypass_count",
    }  # fmt: skip


def test_a_builder_beside_the_file_is_found(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`serve run` looks in the working folder too."""
    (tmp_path / "beside.py").write_text("from deployments.app import capability as build\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", os.getcwd())])
    config = with_applications()
    chat(config)["import_path"] = "beside:build"
    assert run("check", str(written(config, tmp_path))).exit_code == 0


def test_checking_starts_no_cluster_and_no_thread() -> None:
    code = (
        "import ray, sys, threading; from deployments.cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        "assert not ray.is_initialized(); assert threading.active_count() == 1; sys.exit(code)"
    )
    words = ["check", str(ROOT / SHIPPED[1])]
    subprocess.run([sys.executable, "-c", code, *words], timeout=120, check=True)


@pytest.mark.spec("J5")
def test_budget_that_a_cold_request_exceeds_is_told_with_its_seconds(
    run: Run, tmp_path: Path
) -> None:
    config = shipped("serve_config.yaml")
    table = config["applications"][0]["deployments"][0]["user_config"]
    table["arbiter"]["state_file"] = str(tmp_path / "state" / "arbiter.sqlite")
    ladder = ["small-chat", "minilm-reranker"]
    table["tasks"] = {
        "quick": {"ladder": ladder, "budget_s": 4},
        "slow": {"ladder": ["small-chat"], "budget_s": 6},
        "free": {"ladder": ladder},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    chat = check_file(file).capabilities["chat"]
    key = ModelKey("chat", "small-chat", plan("small-chat", chat).settings_key)
    known = Estimates(DEFAULTS)
    known.loaded(key, seconds(3), Bytes(1 << 20))
    for took_s in (0.5, 2.0, 0.5):
        known.ran(key, seconds(took_s))
    store = Store(tmp_path / "state" / "arbiter.sqlite", "session")
    store.save_learned(known.export())
    store.close()
    first, second = json.loads(run("check", str(file), "--json").stdout)["warnings"]
    assert first.startswith("tasks.quick: small-chat: the budget of 4.0 s is less")
    assert "a load of 3.0 s" in first and "up to 2.0 s" in first
    assert "minilm-reranker: no load was seen yet" in second
    assert "the budget of 4.0 s" in run("check", str(file)).stdout
