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
from functools import partial
from pathlib import Path

from tests.bugs import Bug
from tests.bugs.planting import BUGS, mutated

ROOT = Path(__file__).parents[1]
TIERS = ("unit", "style", "model", "sim")  # the cheapest first
UNIT = Path("tests/unit")
ENGINES = Path("tests/engines")
# The units that need vLLM or torch and transformers themselves, whose imports take 5 s.
WITH_LIBRARIES = (ENGINES / "vllm", ENGINES / "libraries")
BUGS_FIT = "tests/style/test_bugs.py"  # fails with each bug, because that one fits no more
# Where the core lies, most bugs show in the tests of another rule: all of these are run.
CORE_FOLDERS = ("arbiter/core", "policies")
# Where the nearest test is not called as the file is: the subject has a test of its own.
NEAR = {
    "arbiter/client/session.py": "arbiter/client/test_holder.py",
    "arbiter/core/arbiter.py": "arbiter/core/queue/test_admission.py",
    "arbiter/core/dispatch.py": "arbiter/core/residency/test_floors.py",
    "arbiter/core/eviction/eligibility.py": "arbiter/core/eviction/test_eviction.py",
    "arbiter/core/eviction/protection.py": "arbiter/core/eviction/test_eviction.py",
    "arbiter/core/eviction/oversize.py": "arbiter/core/queue/test_grants.py",
    "arbiter/core/eviction/waste.py": "arbiter/core/eviction/test_compaction.py",
    "arbiter/core/queue/grant_limits.py": "arbiter/core/queue/test_grants.py",
    "arbiter/core/queue/new_loads.py": "arbiter/core/queue/test_grants.py",
    "arbiter/core/queue/several_devices.py": "arbiter/core/queue/test_gangs.py",
    "arbiter/core/queue/wakes.py": "arbiter/core/queue/test_grants.py",
    "arbiter/core/queue/pass_state.py": "arbiter/core/queue/test_grants.py",
    "arbiter/core/records/load_predictor.py": "arbiter/core/queue/test_wait_estimate.py",
    "arbiter/core/records/request_queue.py": "arbiter/core/queue/test_grants.py",
    "arbiter/core/records/ticket.py": "arbiter/core/tickets/test_reclaim.py",
    "arbiter/core/records/timers.py": "arbiter/core/tickets/test_reclaim.py",
    "arbiter/core/state.py": "arbiter/core/residency/test_heartbeats.py",
    "arbiter/core/tickets/loads.py": "arbiter/core/tickets/test_reclaim.py",
    "arbiter/client/gang_request.py": "deployments/replica/test_use_all.py",
    "arbiter/errors/base.py": "arbiter/test_errors.py",
    "arbiter/server/configuration.py": "arbiter/server/test_lasting_state.py",
    "deployments/engines/vllm/batching/batch_admission.py": (
        "deployments/engines/vllm/batching/test_batch_gate.py"
    ),
    "deployments/replica/held_model.py": "deployments/replica/test_residency.py",
}
# Only the plugins that these tests use: each other one costs every start a part of a second.
PLUGINS = ("pytest_asyncio.plugin", "pytest_timeout", "_hypothesis_pytestplugin")
SEEDS = "100"  # the fewest, in tens, that meet every kind of fault
LEAST_CAUGHT = 0.9
# Of processor time, so that a busy machine is no failure: an endless loop is caught as well. Of a
# bug the longest tier takes 40 s; without any, all of tests/unit are run.
PER_BUG_S, WITHOUT_BUG_S = 90, 600
FAILED = 1  # pytest's exit status where tests ran and some failed


@contextmanager
def planted(bug: Bug, copy: Path) -> Iterator[None]:
    """Put back with its time, so that the bytecode of the code without bugs stays good."""
    path = copy / bug.path
    text, times = path.read_text(), path.stat()
    path.write_text(mutated(bug, text))
    try:
        yield
    finally:
        path.write_text(text)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def batches_of(tier: str, bug: Bug | None) -> list[list[str]]:
    """The tests nearest to the file come first, by themselves: most bugs are caught by those, and
    to collect all the others takes longer than to run these."""
    if tier != "unit":
        return [[f"tests/{tier}", f"--ignore={BUGS_FIT}"]]
    core_tests = [str(UNIT / folder) for folder in CORE_FOLDERS]
    if bug is None:
        return [[str(UNIT)]]
    path = Path(bug.path)
    names = [UNIT / NEAR.get(bug.path, path.parent / f"test_{path.name}")]
    names += [folder / f"test_{path.name}" for folder in WITH_LIBRARIES]
    near = [str(name) for name in names if name.exists()]
    is_core = bug.path.startswith((*CORE_FOLDERS, "arbiter/errors/"))
    rest = core_tests if is_core else [str(UNIT / path.parts[0])]
    if bug.path.startswith("deployments/engines/vllm/"):
        rest += map(str, WITH_LIBRARIES)
    return [near, rest] if near else [rest]


def first_failure(tier: str, copy: Path, bug: Bug | None) -> str:
    """The name of the test; nothing where all pass."""
    found = (failure_of(files, copy, bug) for files in batches_of(tier, bug))
    return next((name for name in found if name), "")


def failure_of(files: list[str], copy: Path, bug: Bug | None) -> str:
    """The same of these files. A bug that no test can even import is none."""
    plugins = [word for name in PLUGINS for word in ("-p", name)]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", *plugins]
    env = {
        **os.environ, "PYTHONPATH": str(copy), "SIM_SEEDS": SEEDS, "EXAMPLES_SHARE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1" if bug else "",
    }  # fmt: skip
    done = subprocess.run(
        [*command, *files],
        cwd=copy, env=env, capture_output=True, text=True, check=False,
        preexec_fn=partial(bounded, PER_BUG_S if bug else WITHOUT_BUG_S),
    )  # fmt: skip
    if done.returncode in (0, -signal.SIGKILL):
        return "no end" if done.returncode else ""
    failed = re.search(r"^FAILED \S*::(\w+)", done.stdout, re.MULTILINE)
    if done.returncode != FAILED or failed is None:
        raise SystemExit(f"{bug.name if bug else files} does not run:\n{done.stdout}{done.stderr}")
    return failed[1]


def bounded(processor_s: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (processor_s, processor_s))


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
        mutated(bug, (ROOT / bug.path).read_text())
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
