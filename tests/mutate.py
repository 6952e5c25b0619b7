"""Do the tests bite? Plants one bug at a time in a copy and names the first test that fails.

    python -m tests.mutate              stops at the first tier that catches a bug
    python -m tests.mutate --all        runs every tier on every bug
    python -m tests.mutate NAME ...     only these
    python -m tests.mutate --from NAME  this one and those after it, where a run was cut short

Exit status 1 when fewer than nine tenths are caught, or when a bug no longer applies to the code.
"""

import argparse
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bugs import Bug, around, core, subtle

ROOT = Path(__file__).parents[1]
BUGS = core.BUGS + subtle.BUGS + around.BUGS
TIERS = ("unit", "style", "model", "sim")  # the cheapest first
# The unit tests of the core and the policies; the others test what lies outside them. Those that
# try many examples come last.
CORE = (
    "admission eviction explain floors forecast gangs granting growth holders idle leases nodes "
    "parts preload pressure reclaim sleep tenants urgency watermarks estimates hours scratch "
    "victims policies"
).split()
# Where the test that is nearest to a file is not called as it is.
NEAR = {
    "accounts": "tenants", "admit_fifo": "parts", "alarms": "reclaim", "core": "admission",
    "evict_priority_lru": "policies", "groups": "granting", "keep_warm": "idle",
    "ledger": "reclaim", "line": "granting", "loads": "reclaim", "look": "granting",
    "state": "holders", "oversize": "granting", "overtaking": "granting",
    "place_best_fit": "admission", "predictor": "forecast",
    "ranking": "eviction", "sites": "nodes", "slot": "residency",
    "watch": "idle",
}  # fmt: skip
# Only the plugins that these tests use: each other one costs every start a part of a second.
PLUGINS = ("pytest_asyncio.plugin", "pytest_timeout", "_hypothesis_pytestplugin")
SEEDS = "60"
LEAST_CAUGHT = 0.9
# Of processor time, so that a busy machine is no failure: an endless loop is caught as well. The
# longest tier takes 20 s.
PER_TIER_S = 90
FAILED = 1  # pytest's exit status where tests ran and some failed


def quoted(bug: Bug, root: Path) -> str:
    """The file it is planted in."""
    text = (root / bug.path).read_text()
    if text.count(bug.old) != 1:
        raise SystemExit(f"{bug.name}: found {text.count(bug.old)} times in {bug.path}")
    return text


@contextmanager
def planted(bug: Bug, copy: Path) -> Iterator[None]:
    """Put back with its time, so that the bytecode of the code without bugs stays good."""
    path = copy / bug.path
    text, times = quoted(bug, copy), path.stat()
    path.write_text(text.replace(bug.old, bug.new))
    try:
        yield
    finally:
        path.write_text(text)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def batches_of(tier: str, bug: Bug | None) -> list[list[str]]:
    """The tests nearest to the file come first, by themselves: most bugs are caught by those, and
    to collect all the others takes longer than to run these."""
    if tier != "unit":
        return [[f"tests/{tier}"]]
    stem = Path(bug.path).stem if bug else ""
    names = bug.tests if bug and bug.tests else CORE
    near = [name for name in names if name == NEAR.get(stem, stem)]
    rest = [name for name in names if name not in near]
    return [[f"tests/unit/test_{n}.py" for n in batch] for batch in (near, rest) if batch]


def first_failure(tier: str, copy: Path, bug: Bug | None) -> str:
    """The name of the test; nothing where all pass."""
    found = (failure_of(files, copy, bug) for files in batches_of(tier, bug))
    return next((name for name in found if name), "")


def failure_of(files: list[str], copy: Path, bug: Bug | None) -> str:
    """The same of these files. A bug that no test can even import is none."""
    plugins = [word for name in PLUGINS for word in ("-p", name)]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", *plugins]
    env = {
        **os.environ, "PYTHONPATH": str(copy), "SIM_SEEDS": SEEDS,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1" if bug else "",
    }  # fmt: skip
    done = subprocess.run(
        [*command, *files],
        cwd=copy, env=env, capture_output=True, text=True, check=False, preexec_fn=bounded,
    )  # fmt: skip
    if done.returncode in (0, -signal.SIGKILL):
        return "no end" if done.returncode else ""
    failed = re.search(r"^FAILED \S*::(\w+)", done.stdout, re.MULTILINE)
    if done.returncode != FAILED or failed is None:
        raise SystemExit(f"{bug.name if bug else files} does not run:\n{done.stdout}{done.stderr}")
    return failed[1]


def bounded() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (PER_TIER_S, PER_TIER_S))


def judge(copy: Path, bug: Bug | None, run_all: bool) -> dict[str, str]:
    """The tiers that fail and the first test of each that does; with no bug, on the code as it
    is."""
    caught: dict[str, str] = {}
    for tier in TIERS:
        if name := first_failure(tier, copy, bug):
            caught[tier] = name
            if not run_all:
                break
    return caught


def chosen() -> tuple[list[Bug], bool]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--from", dest="first")
    asked = parser.parse_args()
    names = [bug.name for bug in BUGS]
    if unknown := {*asked.names, asked.first or names[0]} - {*names}:
        raise SystemExit(f"no such bug: {sorted(unknown)}")
    later = BUGS[names.index(asked.first) if asked.first else 0 :]
    return [b for b in later if not asked.names or b.name in asked.names], asked.all


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def main() -> int:
    bugs, run_all = chosen()
    for bug in bugs:
        quoted(bug, ROOT)
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        copy = Path(folder) / "copy"  # of all that counts, so that one may go on working meanwhile
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        if broken := judge(copy, None, run_all=True):
            print(f"without any bug these fail: {broken}")
            return 1
        return table(copy, bugs, run_all)


def table(copy: Path, bugs: list[Bug], run_all: bool) -> int:
    print(f"commit {commit()}, Python {platform.python_version()}, {SEEDS} seeds of simulation\n")
    print("| bug | " + " | ".join(TIERS) + " | first test that fails |")
    print("|---|" + "---|" * (len(TIERS) + 1), flush=True)
    caught_count = 0
    for bug in bugs:
        with planted(bug, copy):
            caught = judge(copy, bug, run_all)
        caught_count += bool(caught)
        marks = " | ".join("x" if tier in caught else " " for tier in TIERS)
        by = f"`{next(iter(caught.values()))}`" if caught else "**not caught**"
        print(f"| {bug.name} | {marks} | {by} |", flush=True)
    print(f"\n{caught_count} of {len(bugs)} caught ({caught_count / len(bugs):.0%})")
    return int(caught_count < LEAST_CAUGHT * len(bugs))


if __name__ == "__main__":
    raise SystemExit(main())
