"""What the files of deploy/ say is true of this repository: paths, ports, variables, versions.

What only Docker or Kubernetes can prove is not claimed here.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import start
from deployments.cli.main import main
from deployments.config.schema import parse_table
from deployments.config.start_variables import VARIABLES
from deployments.front.access.auth import host_name
from deployments.front.access.keys import keys_path
from deployments.monitoring import files as monitoring
from tests.support.tools import tool
from tools import install, rayservice

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
HOME = Path("/home/arbiter")
MODELS, STATE = HOME / ".cache" / "serve-arbiter", HOME / ".local" / "state" / "serve-arbiter"
CONFIG: dict[str, Any] = yaml.safe_load((ROOT / "serve_config.yaml").read_text())


def lines_of(dockerfile: str) -> list[str]:
    """Instructions, each in one line, without comments."""
    text = re.sub(r"^\s*#.*\n", "", dockerfile, flags=re.M)
    return [line for line in re.sub(r"\\\n\s*", "", text).splitlines() if line]


def stages() -> dict[str, list[list[str]]]:
    """Words of each instruction by stage, those of the stages it is built from first."""
    instructions: dict[str, list[list[str]]] = {}
    for line in lines_of((DEPLOY / "Dockerfile").read_text()):
        words = line.split()
        if words[0] == "FROM":
            stage = instructions[words[3]] = list(instructions.get(words[1], []))
        else:
            stage.append(words)
    return instructions


def of(stage: str, instruction: str) -> list[list[str]]:
    return [words[1:] for words in stages()[stage] if words[0] == instruction]


def environment(stage: str) -> dict[str, str]:
    pairs = [pair for words in of(stage, "ENV") for pair in words]
    return dict(pair.split("=", 1) for pair in pairs)


def json_of(stage: str, instruction: str) -> list[str]:
    words: list[str] = yaml.safe_load(" ".join(of(stage, instruction)[-1]))
    return words


@pytest.mark.spec("M3")
def test_linter_of_dockerfiles_finds_nothing() -> None:
    done = subprocess.run(
        [BIN / "hadolint", DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.spec("M3")
@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_image_copies_what_is_there_and_what_the_configuration_imports(target: str) -> None:
    copied = {source for words in of(target, "COPY") for source in words[:-1]}
    assert all((ROOT / source).exists() for source in copied)
    assert {"arbiter", "deployments", "models", "policies", "deploy/start.py"} <= copied
    assert set(json_of(target, "CMD")) <= copied
    assert f"constraints-{target}.txt" in copied
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    allowed = [line[1:] for line in ignored if line.startswith("!")]
    assert ignored[0] == "*"
    with_folders = {source: [Path(source), *Path(source).parents] for source in copied}
    assert all(
        any(path.match(glob) for glob in allowed for path in paths)
        for paths in with_folders.values()
    )


@pytest.mark.spec("M3")
@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_image_starts_what_exists_as_no_root_and_looks_at_the_port_of_the_file(target: str) -> None:
    assert of(target, "USER")[-1] == ["1000"]
    tini, group, dashes, python, *arguments = json_of(target, "ENTRYPOINT")
    assert (tini, group, dashes, python) == ("tini", "-g", "--", "python")
    assert "tini" in " ".join(of(target, "RUN")[0])
    parsed = start.arguments([*arguments[1:], *json_of(target, "CMD")])
    assert arguments[0] == "deploy/start.py" and parsed.host == "0.0.0.0"
    config = yaml.safe_load((ROOT / parsed.file).read_text())
    port = str(config["http_options"]["port"])
    assert of(target, "EXPOSE") == [[port]]
    assert f"http://127.0.0.1:{port}/health" in " ".join(of(target, "HEALTHCHECK")[0])
    assert {str(MODELS), str(STATE)} <= set(json_of(target, "VOLUME"))


@pytest.mark.spec("M3")
def test_image_and_unit_have_the_variables_of_arbiter_serve() -> None:
    assert VARIABLES.items() <= environment("cpu").items()
    hub = {"HF_HUB_OFFLINE": "0"}  # its configuration names models of a hub
    assert (VARIABLES | hub).items() <= environment("gpu").items()
    [file] = unit("Service", "EnvironmentFile")
    assert file == "/opt/serve-arbiter/deploy/environment"
    lines = (DEPLOY / "environment").read_text().splitlines()
    assert dict(line.split("=", 1) for line in lines if line[0] != "#") == VARIABLES


@pytest.mark.spec("M3")
def test_install_script_takes_the_words_of_the_image(tmp_path: Path) -> None:
    """With no other file of the repository than those that the stage has copied by then."""
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    for target in ("cpu", "gpu"):
        [command] = [w for w in of(target, "RUN") if "tools/install.py" in w]
        stage = dockerfile.split(f" AS {target}-environment\n")[1].split("\nFROM ")[0]
        for line in re.findall(r"^COPY (.+)$", stage, re.M):
            *sources, to = line.split()
            for source in sources:
                copy = tmp_path / target / (f"{to}{Path(source).name}" if to[-1] == "/" else to)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, copy)
        helped = subprocess.run(
            [sys.executable, "-I", "tools/install.py", "--help"],
            cwd=tmp_path / target,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        options = [word for word in command if word.startswith("--")]
        assert options == ["--venv", "--device", "--without-dev"]
        assert all(option in helped for option in options)


@pytest.mark.spec("M1")
@pytest.mark.parametrize("folder", ["graphql", "tests", "pip", "mcp"])
def test_what_is_compiled_ahead_does_not_depend_on_where_the_checkout_lies(folder: str) -> None:
    packages = f"/home/x/{folder}/checkout/.venv/lib/python3.11/site-packages"
    seldom = re.compile(install.SELDOM_IMPORTED)
    needed = "ray/actor.py", "openai/_models.py", "vllm/envs.py"  # vLLM's server imports openai
    assert not any(seldom.search(f"{packages}/{name}") for name in needed)
    left_out = "mcp/types.py", "scipy/fft/x.py", "torch/testing/x.py", "numpy/ma/tests/test_x.py"
    assert all(seldom.search(f"{packages}/{name}") for name in left_out)


@pytest.mark.spec("M1")
@pytest.mark.parametrize("version", ["3.9", "3.10", "3.13"])
def test_install_script_refuses_a_python_without_engines(version: str) -> None:
    pretended = f"import sys; sys.version_info = ({version.replace('.', ', ')}, 0, 'final', 0)"
    program = f"{pretended}; import runpy; runpy.run_path('tools/install.py', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"is Python {version}; the engines exist for 3.11 and 3.12" in done.stderr
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert asked == ">=3.11,<3.13"


# -- start.py ------------------------------------------------------------------------------------


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the user's state, not made yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "serve-arbiter"


@pytest.mark.spec("M3")
def test_start_listens_where_it_is_told_and_changes_nothing_else(
    tmp_path: Path, state: Path
) -> None:
    given, empty = ROOT / "serve_config.yaml", tmp_path / "empty.yaml"
    assert start.listening_on(given, None) == given and not state.exists()
    everywhere = start.listening_on(given, "0.0.0.0")
    http = CONFIG["http_options"] | {"host": "0.0.0.0"}
    assert yaml.safe_load(everywhere.read_text()) == CONFIG | {"http_options": http}
    assert main(["check", str(everywhere)]) == 0
    empty.write_text(yaml.safe_dump(CONFIG | {"http_options": None}))
    only_host = yaml.safe_load(start.listening_on(empty, "0.0.0.0").read_text())
    assert only_host == CONFIG | {"http_options": {"host": "0.0.0.0"}}


@pytest.mark.spec("M3")
def test_systems_beside_each_other_have_a_copy_each(tmp_path: Path, state: Path) -> None:
    copies = set()
    for port in (8000, 8001):
        file = tmp_path / f"{port}.yaml"
        file.write_text(yaml.safe_dump(CONFIG | {"http_options": {"port": port}}))
        copies.add(start.listening_on(file, "0.0.0.0"))
    ports = [yaml.safe_load(copy.read_text())["http_options"]["port"] for copy in copies]
    assert sorted(ports) == [8000, 8001]


@pytest.mark.spec("M3")
def test_start_makes_the_models_checks_the_file_and_becomes_serve_run(
    monkeypatch: pytest.MonkeyPatch, state: Path
) -> None:
    """All but the last, which would not come back. However often it starts, one file is left."""
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, words: became.append([str(path), *words]))
    monkeypatch.setattr(sys, "argv", ["start.py", "--host", "0.0.0.0", "serve_config.yaml"])
    monkeypatch.chdir(ROOT)
    for _ in range(2):
        start.main()
    [[program, *words], again] = became
    assert again == [program, *words]
    assert Path(program).exists() and words[:2] == ["serve", "run"]
    assert Path(words[2]).parent == state and [*state.iterdir()] == [Path(words[2])]
    assert yaml.safe_load(Path(words[2]).read_text())["http_options"]["host"] == "0.0.0.0"


# -- systemd -------------------------------------------------------------------------------------


def unit(section: str, key: str) -> list[str]:
    """Values of a key: a unit may have it several times."""
    text = (DEPLOY / "serve-arbiter.service").read_text()
    match = re.search(rf"^\[{section}\]\n(.*?)(?=^\[|\Z)", text, re.M | re.S)
    assert match
    return re.findall(rf"^{key}=(.*)$", match[1], re.M)


@pytest.mark.spec("M3")
def test_unit_starts_what_exists_where_it_says() -> None:
    [home], [command] = unit("Service", "WorkingDirectory"), unit("Service", "ExecStart")
    python, script, file = shlex.split(command)
    assert python == f"{home}/.venv/bin/python"
    assert start.arguments([file]).host is None
    assert (ROOT / script).exists() and (ROOT / file).exists()
    [page] = unit("Unit", "Documentation")
    assert (ROOT / page.removeprefix(f"file://{home}/")).exists()
    assert unit("Service", "User") == ["arbiter"] and unit("Service", "KillSignal") == ["SIGINT"]


@pytest.mark.spec("M3")
def test_systemd_finds_no_fault_in_the_unit(tmp_path: Path) -> None:
    """With this checkout in the place of /opt/serve-arbiter."""
    analyze = tool("systemd-analyze")
    text = (DEPLOY / "serve-arbiter.service").read_text()
    here = text.replace("/opt/serve-arbiter/.venv/bin/python", sys.executable)
    path = tmp_path / "serve-arbiter.service"
    path.write_text(here)
    done = subprocess.run([analyze, "verify", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr


# -- compose -------------------------------------------------------------------------------------


def compose() -> dict[str, Any]:
    compose: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return compose


@pytest.mark.spec("M3")
def test_compose_builds_a_target_and_keeps_its_folders_in_volumes() -> None:
    front, volumes = compose()["services"]["front"], compose()["volumes"]
    assert front["build"]["dockerfile"] == "deploy/Dockerfile"
    assert (DEPLOY / front["build"]["context"]).resolve() == ROOT
    assert front["build"]["target"] == "${TARGET:-cpu}" and "cpu" in stages()
    places = dict(volume.split(":", 1) for volume in front["volumes"])
    assert places == {"models": str(MODELS), "state": str(STATE)}
    assert set(places) <= set(volumes)
    assert all(
        p.startswith("127.0.0.1:") for s in compose()["services"].values() for p in s["ports"]
    )
    gpu = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())
    [hub] = gpu["services"]["front"]["volumes"]
    assert hub.split(":", 1)[1] in json_of("gpu", "VOLUME")


@pytest.mark.spec("M3", "K2")
def test_prometheus_and_grafana_find_the_files_that_the_command_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    match = re.search(r"^#   arbiter (metrics install \S+ --url (\S+))$", text, re.M)
    assert match
    _, _, folder, *rest = shlex.split(match[1])
    assert folder == "deploy/monitoring"
    assert main(["metrics", "install", str(tmp_path), *rest]) == 0
    scrape = yaml.safe_load((tmp_path / monitoring.CONFIGURATION).read_text())
    [target] = scrape["scrape_configs"][0]["static_configs"][0]["targets"]
    front = compose()["services"]["front"]
    address = front["networks"]["default"]["ipv4_address"]
    assert target == f"{address}:{CONFIG['http_options']['port']}"
    services = compose()["services"]
    assert services["prometheus"]["volumes"][0] == "./monitoring:/etc/prometheus:ro"
    assert services["prometheus"]["command"] == [
        f"--config.file=/etc/prometheus/{monitoring.CONFIGURATION}"
    ]
    dashboards = yaml.safe_load((DEPLOY / "grafana" / "dashboards" / "arbiter.yaml").read_text())
    where = dashboards["providers"][0]["options"]["path"]
    mounted = f"./monitoring/{monitoring.DASHBOARD}:{where}/{monitoring.DASHBOARD}:ro"
    assert mounted in services["grafana"]["volumes"]
    assert (tmp_path / monitoring.DASHBOARD).exists()
    sources = yaml.safe_load((DEPLOY / "grafana" / "datasources" / "prometheus.yaml").read_text())
    assert sources["datasources"][0]["url"] == "http://prometheus:9090"


# -- KubeRay -------------------------------------------------------------------------------------


def manifest() -> dict[str, Any]:
    """Objects of the file by their kind; the first of a kind with several."""
    found: dict[str, Any] = {}
    for each in yaml.safe_load_all(rayservice.MANIFEST.read_text()):
        found.setdefault(each["kind"], each)
    return found


def pods() -> list[dict[str, Any]]:
    cluster = manifest()["RayService"]["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"] for group in groups]


@pytest.mark.spec("M3")
def test_rayservice_has_the_shipped_configuration_but_for_where_it_listens() -> None:
    text = rayservice.MANIFEST.read_text()
    config = (ROOT / "serve_config.yaml").read_text()
    assert rayservice.with_config(text, config) == text, "run `python tools/rayservice.py`"
    served = yaml.safe_load(manifest()["RayService"]["spec"]["serveConfigV2"])
    table = served["applications"][0]["deployments"][0]["user_config"]
    assert parse_table(table).front.hosts == rayservice.HOSTS
    assert all(host_name(f"{host}:8000") == host for host in rayservice.HOSTS)
    name = manifest()["RayService"]["metadata"]["name"]
    assert all(host.startswith(f"{name}-serve-svc") for host in rayservice.HOSTS)  # as KubeRay's
    del table["front"]
    served["http_options"]["host"] = CONFIG["http_options"]["host"]
    assert served == CONFIG


def test_configuration_of_another_form_is_refused_and_not_left_half_replaced() -> None:
    with pytest.raises(ValueError, match="host"):
        rayservice.in_a_pod("http_options: {host: 127.0.0.1}")
    with pytest.raises(ValueError, match="serveConfigV2"):
        rayservice.with_config("kind: RayService\n", "")


@pytest.mark.spec("M3")
def test_pods_have_resources_memory_for_shared_objects_and_the_folders_of_the_image() -> None:
    for pod in pods():
        spec = pod["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert spec["securityContext"]["runAsUser"] == int(of("cpu", "USER")[-1][0])
        for container in (*spec["initContainers"], *spec["containers"]):
            assert container["image"] == "serve-arbiter:cpu"
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]
            mounts = {m["mountPath"]: volumes[m["name"]] for m in container["volumeMounts"]}
            assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
            assert str(MODELS) in mounts
        assert spec["initContainers"][0]["command"] == ["python", "-m", "models.make_models"]
    head = pods()[0]["spec"]
    claims = {
        v["persistentVolumeClaim"]["claimName"] for v in head["volumes"] if "emptyDir" not in v
    }
    kinds = list(yaml.safe_load_all(rayservice.MANIFEST.read_text()))
    assert claims == {k["metadata"]["name"] for k in kinds if k["kind"] == "PersistentVolumeClaim"}
    assert str(STATE) in {m["mountPath"] for m in head["containers"][0]["volumeMounts"]}
    assert head["containers"][0]["startupProbe"]["exec"]["command"][2].startswith("wget ")
    assert "wget" in of("cpu", "RUN")[0] and "wget" in of("gpu", "RUN")[0]


@pytest.mark.spec("M3", "L0")
def test_cluster_has_the_version_of_ray_a_token_and_a_wall() -> None:
    documents = manifest()
    cluster = documents["RayService"]["spec"]["rayClusterConfig"]
    [version] = re.findall(r"^ray==(.+)$", (ROOT / "constraints-cpu.txt").read_text(), re.M)
    assert cluster["rayVersion"] == version
    assert cluster["authOptions"] == {"mode": "token"}
    assert documents["RayService"]["spec"]["upgradeStrategy"] == {"type": "None"}
    labels = pods()[0]["metadata"]["labels"]
    assert all(pod["metadata"]["labels"] == labels for pod in pods())
    assert documents["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    anyone = [rule for rule in documents["NetworkPolicy"]["spec"]["ingress"] if "from" not in rule]
    assert [p["port"] for rule in anyone for p in rule["ports"]] == [CONFIG["http_options"]["port"]]
    disruption = documents["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]
    assert disruption.items() >= labels.items() and disruption["ray.io/node-type"] == "head"


def test_keys_lie_in_the_volume_of_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(HOME))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert keys_path() == STATE / "keys.json"
