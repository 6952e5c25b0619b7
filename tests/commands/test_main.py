"""The command as a whole: its help, its failures, what it imports, and how it ends."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from arbiter.errors import ArbiterClosing
from deployments.cli import main as command
from deployments.cli.see import show
from tests.support.command_line import Run
from tests.support.scripted_front import ScriptedFront

PANELS = {
    "See": [
        "status", "top", "events", "explain", "plan", "residency", "copies", "pool", "adapters",
        "clients", "metrics",
    ],
    "Steer": [
        "load", "unload", "grow", "shrink", "compact", "drop-copy", "floor", "settings", "forget",
        "task", "jobs",
    ],
    "Leases": ["lease", "free", "leases", "drain", "cleanup"],
    "Cluster": ["init", "check", "serve", "upgrade", "down"],
    "Keys": ["key"],
    "Record and replay": ["record", "whatif"],
}  # fmt: skip
GROUPS = {"key": ("add", "list", "remove"), "task": ("add", "list", "remove")}
GROUPS |= {"metrics": ("install",), "jobs": ("list", "show", "cancel", "tail")}
EVERY = [name for names in PANELS.values() for name in names if name not in GROUPS]
EVERY += [f"{group} {name}" for group, names in GROUPS.items() for name in names]
ARBITER = [sys.executable, "-m", "deployments.cli"]


def test_the_help_is_grouped_by_subject(run: Run) -> None:
    done = run("--help", COLUMNS="200")
    assert done.exit_code == 0
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("╭─"):
            panel = line.strip("╭╮─ ")
            found[panel] = []
        elif line.startswith("│ ") and line[2] != " ":
            found[panel].append(line.split()[1])
    assert {panel: found[panel] for panel in found if panel != "Options"} == PANELS
    assert list(found)[1:] == list(PANELS)


@pytest.mark.parametrize("name", EVERY)
def test_every_command_says_what_it_does_and_has_json(run: Run, name: str) -> None:
    done = run(*name.split(), "--help", COLUMNS="200")
    assert done.exit_code == 0
    assert "--json" in done.stdout


@pytest.mark.parametrize("words", [(), ("statsu",), ("status", "--jsn"), ("explain",)])
def test_a_mistake_in_the_words_has_its_own_exit_status(run: Run, words: tuple[str, ...]) -> None:
    assert run(*words).exit_code == 2


def test_a_shell_can_complete(run: Run) -> None:
    done = run(_ARBITER_COMPLETE="complete_bash", COMP_WORDS="arbiter un", COMP_CWORD="1")
    assert done.stdout.split() == ["unload"]


def test_completion_knows_scopes_and_policies(run: Run) -> None:
    for line, found in (
        ("arbiter key add x --scope in", "infer"),
        ("arbiter whatif x --policy co", "cost_aware"),
    ):
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
        assert run(_ARBITER_COMPLETE="complete_bash", **words).stdout.split() == [found]


def test_an_error_of_the_arbiter_is_a_line_and_no_traceback(
    run: Run, front: ScriptedFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closing(*_: object) -> None:
        raise ArbiterClosing

    monkeypatch.setattr(show, "front", closing)
    failed = run("status")
    assert failed.exit_code == 1
    assert failed.stderr == f"arbiter status: {ArbiterClosing()}\n"


def test_main_returns_the_exit_status(
    owner: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = ["--keys", str(tmp_path / "other.json")]
    assert command.main(["key", "list", "--json", *file]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert command.main(["key", "remove", "x", *file]) == 1
    assert command.main(["no-such-command"]) == 2


# What a command that needs it may import; others start without.
HEAVY = {"ray", "torch", "vllm", "transformers", "numpy"}
# Of no command but those whose subject they are.
RARE = {
    "arbiter.core.settings",
    "arbiter.protocol.messages",
    "arbiter.server.store",
    "deployments.monitoring.view",
    "policies",
    "pydantic_settings",
}
LATER = {"httpx", "pydantic"}


def imported(url: str, *words: str) -> set[str]:
    code = (
        "import sys; from deployments.cli.main import main; code = main(sys.argv[1:])\n"
        "print(*sys.modules, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60,
        env=os.environ | {"ARBITER_URL": url, "ARBITER_KEY": "arb-mine"}, check=True,
    )  # fmt: skip
    return set(done.stderr.split())


def test_help_imports_neither_ray_nor_what_asks_the_front() -> None:
    assert not (HEAVY | RARE | LATER) & imported("http://127.0.0.1:1", "--help")


def test_status_imports_neither_ray_nor_the_arbiter_nor_an_engine(front: ScriptedFront) -> None:
    empty = dict.fromkeys(("devices", "tickets", "queue", "hours", "cooldowns"), ())
    head = {"version": "1", "epoch": 1, "policy": "p", "is_closing": False, "is_settled": True}
    front.says("GET", "/arbiter/state", head | empty)
    with front.serving() as url:
        found = imported(url, "status")
    assert "httpx" in found
    assert not (HEAVY | RARE) & found


def test_a_reader_that_has_seen_enough_ends_the_command_in_silence(front: ScriptedFront) -> None:
    """As `arbiter events | head -1`, with more events than a pipe holds."""
    events = [{"seq": n, "kind": "joined", "unix_s": 0.0} for n in range(20_000)]
    front.says("GET", "/arbiter/events/recent?after=0", {"events": events})
    with front.serving() as url:
        command = subprocess.Popen(
            [*ARBITER, "events", "--url", url], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert command.stdout and command.stdout.readline()
        command.stdout.close()
        assert command.stderr and command.stderr.read() == b""
        assert command.wait(60) == 0
        command.stderr.close()


def test_on_a_terminal_there_are_colours(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    try:
        words = ["key", "list", "--keys", str(tmp_path / "keys.json")]
        env = {**os.environ, "TERM": "xterm"}
        env.pop("NO_COLOR", None)
        done = subprocess.run([*ARBITER, *words], stdout=theirs, env=env, timeout=60, check=False)
        assert done.returncode == 0
        assert b"\x1b[1m" in os.read(ours, 10_000)
    finally:
        os.close(ours)
        os.close(theirs)
