"""`arbiter metrics`: the files that Prometheus and Grafana read."""

import json
import re
from pathlib import Path

import pytest
import yaml

from deployments.monitoring.alerts import ALERTS
from deployments.monitoring.panels import PANELS
from tests.support.command_line import Run

QUERIES = [query.promql for panel in PANELS for query in panel.queries]
QUERIES += [alert.promql for alert in ALERTS]


@pytest.mark.spec("K2")
def test_the_command_writes_files_that_prometheus_and_grafana_read(
    run: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "watch"
    words = ("metrics", "install", str(folder), "--url", "https://gpu.lan:8443", "--key")
    done = run(*words, "--json")
    assert done.exit_code == 0
    paths = [Path(path) for path in json.loads(done.stdout)["files"]]
    dashboard, rules, scrape = (path.read_text() for path in paths)
    asked = [t["expr"] for p in json.loads(dashboard)["panels"] for t in p["targets"]]
    [group] = yaml.safe_load(rules)["groups"]
    assert asked + [rule["expr"] for rule in group["rules"]] == QUERIES
    configuration = yaml.safe_load(scrape)
    assert configuration["rule_files"] == [paths[1].name]
    [job] = configuration["scrape_configs"]
    assert job["scheme"] == "https"
    assert job["static_configs"] == [{"targets": ["gpu.lan:8443"]}]
    assert job["authorization"] == {"credentials_file": "arbiter-view.key"}
    assert "arbiter-view.key" in run(*words).stdout


@pytest.mark.spec("K2")
def test_a_folder_that_cannot_be_written_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run("metrics", "install", str(tmp_path / "file"))
    assert done.exit_code == 1
    assert f"cannot write into {tmp_path / 'file'}" in done.stderr


@pytest.mark.spec("K5")
def test_dashboard_for_rays_grafana_reads_what_rays_exporter_shows(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "root" / "grafana" / "dashboards"
    monkeypatch.setenv("RAY_METRICS_OUTPUT_ROOT", str(tmp_path / "root"))
    words = ("metrics", "install", str(tmp_path / "watch"), "--ray")
    refused = run(*words)
    assert refused.exit_code == 1 and f"cannot write into {folder}, of Ray" in refused.stderr
    folder.mkdir(parents=True)
    path = Path(json.loads(run(*words, "--json").stdout)["files"][-1])
    assert path.parent == folder and path.name.endswith("_dashboard.json")
    plain = json.loads((tmp_path / "watch" / "arbiter-dashboard.json").read_text())
    of_ray = json.loads(path.read_text())
    assert of_ray["uid"] != plain["uid"], "Grafana keeps one of each"
    for ours, rays in zip(plain["panels"], of_ray["panels"], strict=True):
        for one, other in zip(ours["targets"], rays["targets"], strict=True):
            names = re.findall(r"\b(?:ray_)?arbiter_\w+", other["expr"])
            assert names and all(name.startswith("ray_arbiter_") for name in names)
            assert other["expr"].replace("ray_arbiter_", "arbiter_") == one["expr"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR", str(elsewhere))
    assert run(*words).exit_code == 0 and list(elsewhere.iterdir())
