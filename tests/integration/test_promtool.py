"""Prometheus's own tool reads the files, and its engine says when each alert fires."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.monitoring.alerts import ALERTS
from deployments.monitoring.files import CONFIGURATION, RULES, write
from deployments.monitoring.panels import PANELS
from tests.support.tools import tool

MINUTES = 130  # the slowest alert looks back an hour and a half
DEVICE = 'node="n", device="n/gpu:0"'
QUIET = {
    "arbiter_up": f"1x{MINUTES}",
    "arbiter_epoch": f"7x{MINUTES}",
    f'arbiter_device_state_bytes{{{DEVICE}, state="free"}}': f"5x{MINUTES}",
    f"arbiter_device_readable{{{DEVICE}}}": f"1x{MINUTES}",
    f"arbiter_device_pressure_level{{{DEVICE}}}": f"1x{MINUTES}",
    f"arbiter_device_measured_bytes{{{DEVICE}}}": f"104x{MINUTES}",
    f"arbiter_device_granted_bytes{{{DEVICE}}}": f"100x{MINUTES}",
    "arbiter_queue_oldest_seconds": f"100x{MINUTES}",
    'arbiter_tickets_refused_total{code="deadline_unmet"}': f"3x{MINUTES}",
    'arbiter_tickets_refused_total{code="queue_full"}': f"0+1x{MINUTES}",
    'arbiter_load_failures_total{capability="chat"}': f"2x{MINUTES}",
    f"arbiter_device_loading_ratio{{{DEVICE}}}": f"0.4x{MINUTES}",
    'arbiter_quarantined_bytes{node="n"}': f"0x{MINUTES}",
    'arbiter_estimate_ratio_bucket{capability="chat", le="1.1"}': f"0+1x{MINUTES}",
    'arbiter_estimate_ratio_bucket{capability="chat", le="1.5"}': f"0+1x{MINUTES}",
    'arbiter_estimate_ratio_bucket{capability="chat", le="+Inf"}': f"0+1x{MINUTES}",
    'arbiter_events_total{kind="state_not_kept"}': f"0x{MINUTES}",
    'arbiter_events_total{kind="eviction"}': f"0+1x{MINUTES}",
}
FIRES: list[tuple[str, str, str | None]] = [
    ("ArbiterAway", "arbiter_up", f"0x{MINUTES}"),
    ("ArbiterAway", "arbiter_up", None),  # no front answers
    ("ArbiterRestarts", "arbiter_epoch", f"7+1x{MINUTES}"),
    ("DeviceOvercommitted", "arbiter_device_state_bytes", f"-1x{MINUTES}"),
    ("DeviceUnreadable", "arbiter_device_readable", f"0x{MINUTES}"),
    ("MemoryPressureCritical", "arbiter_device_pressure_level", f"2x{MINUTES}"),
    ("MeasuredAboveGranted", "arbiter_device_measured_bytes", f"106x{MINUTES}"),
    ("QueueStands", "arbiter_queue_oldest_seconds", f"121x{MINUTES}"),
    ("DeadlinesMissed", 'arbiter_tickets_refused_total{code="deadline', f"3+1x{MINUTES}"),
    ("LoadsFail", "arbiter_load_failures_total", f"2+1x{MINUTES}"),
    ("Thrashing", "arbiter_device_loading_ratio", f"0.6x{MINUTES}"),
    ("MemoryKeptByTheDead", "arbiter_quarantined_bytes", f"9x{MINUTES}"),
    (
        "EstimatesTooLow",
        'arbiter_estimate_ratio_bucket{capability="chat", le="1.1"',
        f"0x{MINUTES}",
    ),
    ("StateNotKept", 'arbiter_events_total{kind="state', f"0x{MINUTES - 5} 1x5"),
]


def run(*words: str, cwd: Path) -> str:
    """What promtool says; the test fails with it when promtool finds a fault."""
    done = subprocess.run(
        [tool("promtool"), *words], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.spec("K2")
@pytest.mark.parametrize("has_key", [False, True])
def test_promtool_reads_the_configuration_and_its_rules(tmp_path: Path, has_key: bool) -> None:
    write(tmp_path, "127.0.0.1:8000", "http", has_key=has_key)
    (tmp_path / "arbiter-view.key").write_text("key")
    said = run("check", "config", CONFIGURATION, cwd=tmp_path)
    assert f"SUCCESS: {len(ALERTS)} rules found" in said


@pytest.mark.spec("K2")
def test_promtool_reads_every_query_of_the_dashboard(tmp_path: Path) -> None:
    queries = [query.promql for panel in PANELS for query in panel.queries]
    rules = [{"record": f"panel:{n}", "expr": query} for n, query in enumerate(queries)]
    (tmp_path / "panels.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]})
    )
    assert f"{len(queries)} rules found" in run("check", "rules", "panels.yml", cwd=tmp_path)


def case(series: dict[str, str], fires: list[str]) -> dict[str, Any]:
    """What promtool is to find at the end of these series."""
    samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in fires]
    asked = 'count by (alertname) (ALERTS{alertstate="firing"})'
    end = {"expr": asked, "eval_time": f"{MINUTES}m", "exp_samples": samples}
    given = [{"series": name, "values": values} for name, values in series.items()]
    return {"interval": "1m", "input_series": given, "promql_expr_test": [end]}


def changed(part: str, values: str | None) -> dict[str, str]:
    """The quiet series, but for the one whose name begins so."""
    [name] = [name for name in QUIET if name.startswith(part)]
    rest = {each: QUIET[each] for each in QUIET if each != name}
    return rest if values is None else rest | {name: values}


@pytest.mark.spec("K2")
def test_each_alert_fires_for_its_cause_and_no_other_does(tmp_path: Path) -> None:
    assert {name for name, _, _ in FIRES} == {alert.name for alert in ALERTS}
    write(tmp_path, "127.0.0.1:8000", "http", has_key=False)
    cases = [
        case(QUIET, []),
        *(case(changed(part, values), [name]) for name, part, values in FIRES),
    ]
    tests = {"rule_files": [RULES], "evaluation_interval": "1m", "tests": cases}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(tests, width=1000))
    assert "SUCCESS" in run("test", "rules", "tests.yml", cwd=tmp_path)
