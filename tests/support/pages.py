"""Blocks of README.md and docs/*.md to paste, and why some are not run against the graph."""

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# An answer of 400 or more fails its block, and so does an answer that does not come.
CURLRC = "fail-with-body\nmax-time = 120\n"
WITHIN_S = 240.0  # the longest block loads four models
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True, slots=True)
class Block:
    """What stands between two fences, and where."""

    page: str
    language: str
    text: str

    @property
    def name(self) -> str:
        """Its page and first line; blocks that begin alike share what is said of them."""
        return f"{self.page}: {self.text.splitlines()[0].strip()}"


def blocks(page: Path) -> list[Block]:
    where = str(page.relative_to(ROOT))
    return [Block(where, language, text) for language, text in _BLOCK.findall(page.read_text())]


# By page and first line. A test is named where it runs the same.
STARTS = "starts or replaces a system; run by"
NOT_RUN: dict[str, str] = {
    "README.md: make serve   # environment, engines, models, then `arbiter serve`":
        f"{STARTS} test_plain_serve_run_of_a_written_file_answers_and_is_warm and .ci/run",
    "README.md: make install DEVICE=gpu VENV=.venv-gpu": "needs a GPU and a model hub",
    "docs/deploy.md: sudo useradd --system --create-home arbiter": "needs root and systemd",
    "docs/deploy.md: docker build -f deploy/Dockerfile --target cpu -t serve-arbiter:cpu .":
        "needs Docker",
    "docs/deploy.md: IMAGE=registry.example.org/serve-arbiter:0.1.0-cpu":
        "needs Docker, a registry and Kubernetes",
    "docs/deploy.md: docker compose -f deploy/compose.yaml up --build --wait": "needs Docker",
    "docs/deploy.md: set -a; . deploy/environment; set +a":
        "needs two machines; two raylets of one are run by test_node_spawns_under_no_grant_of"
        "_another_and_a_dead_node_leaves_with_its_devices",
    "docs/deploy.md: STATE=${XDG_STATE_HOME:-$HOME/.local/state}/serve-arbiter":
        "needs a stopped system; run by"
        " test_backup_taken_while_it_is_written_brings_back_what_was_learned_and_the_keys",
    "docs/deploy.md: git pull":
        f"{STARTS} test_upgrade_to_other_code_leaves_nothing_of_the_old_but_its_holders",
    "docs/operations.md: import json, os, socket, sys":
        "needs a model with `host_copy: group`; its steps are run by"
        " test_another_user_reaches_the_files_by_the_socket_if_it_is_of_the_group",
    "docs/remotes.md: FAR=$(.venv/bin/arbiter key add ann --scope infer --scope cloud)":
        "needs a row in the table and adds keys; run by"
        " test_a_remote_model_answers_as_a_local_one_and_each_egress_is_written_down",
}  # fmt: skip


def to_paste(page: Path) -> list[Block]:
    """The blocks of a page that a reader runs, in their order."""
    return [block for block in blocks(page) if block.language in ("sh", "python")]


def run(text: str, folder: Path, environment: Mapping[str, str], language: str = "sh") -> str:
    """What a block prints that is pasted into a shell, or into Python, in `folder`. Fails as it
    does."""
    (folder / ".curlrc").write_text(CURLRC)
    shell = ["bash", "-euo", "pipefail", "-c", text]
    command = shell if language == "sh" else [sys.executable, "-c", text]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**environment, "CURL_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-2_000:]}\n{done.stderr[-2_000:]}"
    return done.stdout


def as_checkout(folder: Path) -> None:
    """What blocks name by a path from the root of the repository."""
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "serve_config.yaml").symlink_to(ROOT / "serve_config.yaml")
    shutil.copytree(ROOT / "deploy", folder / "deploy")  # blocks write there
