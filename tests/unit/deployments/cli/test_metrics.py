"""`arbiter metrics`: the files that Prometheus and Grafana read."""

import json
from pathlib import Path

import pytest
import yaml

from deployments.monitoring.alerts import ALERTS
from deployments.monitoring.panels import PANELS
from tests.unit.deployments.cli.conftest import Run

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
