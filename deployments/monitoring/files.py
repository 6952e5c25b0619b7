"""Writes the files of Prometheus and Grafana into a folder (K2), and the dashboard to where the
Grafana of a Ray cluster finds it (K5)."""

import json
import os
from pathlib import Path
from typing import Any

import yaml

from deployments.monitoring.alerts import rules
from deployments.monitoring.panels import dashboard

DASHBOARD, RULES, CONFIGURATION = "arbiter-dashboard.json", "arbiter-rules.yml", "prometheus.yml"
KEY = "arbiter-view.key"
RAY_DASHBOARD, RAY_PREFIX = "serve_arbiter_grafana_dashboard.json", "ray_"


def configuration(target: str, scheme: str) -> dict[str, Any]:
    """Returns a prometheus.yml that scrapes the front at `target`, a host and port."""
    return {
        "global": {"scrape_interval": "10s"},
        "rule_files": [RULES],
        "scrape_configs": [
            {
                "job_name": "serve-arbiter",
                "scheme": scheme,
                "static_configs": [{"targets": [target]}],
            }
        ],
    }


def write(folder: Path, target: str, scheme: str, *, has_key: bool) -> list[Path]:
    """Returns the paths written; what was there under these names is replaced. `has_key`: the
    scrape sends the key in KEY, beside the files, which a person puts there. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    scrape = configuration(target, scheme)
    if has_key:
        credentials = {"credentials_file": KEY}
        scrape["scrape_configs"][0]["authorization"] = credentials
    texts = {
        DASHBOARD: json.dumps(dashboard(), indent=2) + "\n",
        RULES: yaml.safe_dump(rules(), sort_keys=False, width=1000),
        CONFIGURATION: yaml.safe_dump(scrape, sort_keys=False),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    return [folder / name for name in texts]


def ray_folder() -> Path:
    """Returns the folder from which Grafana, with the configuration that Ray writes for it, takes
    its dashboards: of the session that began last on this machine, which is to be the head node,
    unless Ray's own variables say otherwise."""
    from ray._common.utils import get_default_ray_temp_dir

    if chosen := os.environ.get("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR"):
        return Path(chosen)
    session = Path(get_default_ray_temp_dir(), "session_latest", "metrics")
    root = os.environ.get("RAY_METRICS_OUTPUT_ROOT") or session
    return Path(root, "grafana", "dashboards")


def write_for_ray() -> Path:
    """Returns the path written. Its panels read what Ray's own exporter shows. Raises OSError, also
    where Ray has made no such folder."""
    path = ray_folder() / RAY_DASHBOARD
    board = dashboard(uid="serve-arbiter-ray", prefix=RAY_PREFIX)
    path.write_text(json.dumps(board, indent=2) + "\n")
    return path
