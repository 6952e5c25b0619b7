"""Writes the files of Prometheus and Grafana into a folder (K2)."""

import json
from pathlib import Path
from typing import Any

import yaml

from deployments.monitoring.alerts import rules
from deployments.monitoring.panels import dashboard

DASHBOARD, RULES, CONFIGURATION = "arbiter-dashboard.json", "arbiter-rules.yml", "prometheus.yml"
KEY = "arbiter-view.key"


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
