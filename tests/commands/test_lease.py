"""`arbiter lease` around a real command, against a front that grants it."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from arbiter.units import GIB, MIB
from tests.support.command_line import Run
from tests.support.scripted_front import LeaseFront, ScriptedFront
from tests.support.waits import eventually

pytestmark = pytest.mark.spec("A15")
WITHIN_S = 60.0
WAITS = """
import signal, sys
signal.signal(signal.Signals[sys.argv[1]], lambda *_: sys.exit(3))
print("ready", flush=True)
while True:
    signal.pause()
"""
STAYS = WAITS.replace("lambda *_: sys.exit(3)", "signal.SIG_IGN")


@pytest.fixture
def granting() -> Iterator[tuple[LeaseFront, str]]:
    front = LeaseFront()
    with front.serving() as url:
        yield front, url
        front.becomes("ended", reason="the test is over")


def started(url: str, *words: str) -> subprocess.Popen[str]:
    env = os.environ | {"ARBITER_URL": url, "ARBITER_KEY": "arb-mine"}
    command = [sys.executable, "-m", "deployments.cli", "lease", *words]
    return subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def program(text: str, signal_name: str) -> list[str]:
    return [sys.executable, "-c", text, signal_name]


def told(front: ScriptedFront, method: str) -> list[Any]:
    return [request for request in list(front.requests) if request.method == method]


def test_the_command_runs_under_its_lease_and_decides_the_exit_status(
    granting: tuple[LeaseFront, str],
) -> None:
    front, url = granting
    done = started(url, "--gb", "2", "--", "bash", "-c", "echo $ARBITER_LEASE; exit 7")
    out, errors = done.communicate(timeout=WITHIN_S)
    assert (done.returncode, errors) == (7, "")
    first, last = told(front, "PUT")[0], told(front, "DELETE")[-1]
    assert first.path == last.path == f"/arbiter/leases/{out.strip()}"
    assert first.headers["authorization"] == "Bearer arb-mine"
    assert (first.body["bytes"], first.body["name"]) == (2 * GIB, "bash")


def test_a_size_may_have_a_unit(granting: tuple[LeaseFront, str]) -> None:
    _, url = granting
    done = started(url, "--size", "300MiB", "--json", "--", "true")
    _, errors = done.communicate(timeout=WITHIN_S)
    assert done.returncode == 0
    held, ended = [json.loads(line) for line in errors.splitlines()]
    assert (held["state"], held["devices_bytes"]) == ("held", {"n/cpu:0": 300 * MIB})
    assert (ended["state"], ended["exit_code"]) == ("ended", 0)


async def test_notice_is_the_signal_that_was_asked_for_and_says_why(
    granting: tuple[LeaseFront, str],
) -> None:
    front, url = granting
    job = started(url, "--gb", "1", "--signal", "usr1", "--", *program(WAITS, "SIGUSR1"))
    assert job.stdout and job.stdout.readline() == "ready\n"
    front.becomes("leaving", reason="a model needs it", left_s=20.0)
    _, errors = job.communicate(timeout=WITHIN_S)
    assert job.returncode == 3
    assert errors.startswith("arbiter lease: a model needs it; the command has ")


async def test_a_command_that_stays_is_killed_at_the_end_of_its_notice(
    granting: tuple[LeaseFront, str],
) -> None:
    front, url = granting
    job = started(url, "--gb", "1", "--json", "--", *program(STAYS, "SIGTERM"))
    assert job.stdout and job.stdout.readline() == "ready\n"
    front.becomes("leaving", reason="a model needs it", left_s=0.1)
    _, errors = job.communicate(timeout=WITHIN_S)
    assert job.returncode == 128 + signal.SIGKILL
    lines = [json.loads(line) for line in errors.splitlines()]
    assert [line["state"] for line in lines] == ["held", "leaving", "ended"]
    assert lines[1]["reason"] == "a model needs it"


async def test_a_command_that_is_interrupted_ends_and_so_does_its_lease(
    granting: tuple[LeaseFront, str],
) -> None:
    front, url = granting
    job = started(url, "--gb", "1", "--", *program(WAITS, "SIGINT"))
    assert job.stdout and job.stdout.readline() == "ready\n"
    job.send_signal(signal.SIGINT)
    assert job.wait(WITHIN_S) == 3
    assert told(front, "DELETE")
    job.communicate()


ON_A_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


def test_command_reads_the_terminal_and_is_not_suspended_by_its_keys(
    granting: tuple[LeaseFront, str],
) -> None:
    _, url = granting
    words = ["lease", "--gb", "1", "--", "bash", "-c", "read a; echo got $a; read b; echo and $b"]
    job = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL, sys.executable, "-m", "deployments.cli", *words],
        env=os.environ | {"ARBITER_URL": url, "ARBITER_KEY": "arb-mine"},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert job.stdin and job.stdout
    bound = threading.Timer(WITHIN_S, job.kill)  # then there are no more lines
    bound.start()
    job.stdin.write("one\n")
    job.stdin.flush()
    assert any("got one" in line for line in job.stdout)
    job.stdin.write("\x1a")  # Ctrl-Z
    job.stdin.flush()
    assert any("is not suspended" in line for line in job.stdout)
    out, _ = job.communicate("two\n", timeout=WITHIN_S)
    bound.cancel()
    assert (job.returncode, "and two" in out) == (0, True)


def test_terminal_of_another_session_is_left_alone(granting: tuple[LeaseFront, str]) -> None:
    _, url = granting
    master, slave = os.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "deployments.cli", "lease", "--gb", "1", "--", "true"],
        env=os.environ | {"ARBITER_URL": url, "ARBITER_KEY": "arb-mine"},
        stdin=slave,
        start_new_session=True,
        timeout=WITHIN_S,
        check=False,
    )
    os.close(master)
    os.close(slave)
    assert done.returncode == 0


async def test_an_interrupted_wait_withdraws_and_is_no_success(
    granting: tuple[LeaseFront, str],
) -> None:
    front, url = granting
    front.becomes("queued")
    job = started(url, "--gb", "1", "--", "true")
    await eventually(lambda: told(front, "PUT"), WITHIN_S)
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=WITHIN_S)
    assert job.returncode == 130
    assert told(front, "DELETE")


def test_a_refused_lease_runs_nothing(run: Run, owner: str) -> None:
    class Refuses(ScriptedFront):
        def answer(self, method: str, path: str, headers: dict[str, str], raw: bytes) -> Any:
            self.refuses(method, path, 400, "invalid_request", "`bytes`: more than there is")
            return super().answer(method, path, headers, raw)

    with Refuses().serving() as url:
        failed = run("lease", "--gb", "999", "--url", url, "--", "true")
    assert failed.exit_code == 1
    assert "`bytes`: more than there is" in failed.stderr


def test_a_command_that_does_not_exist_is_named(run: Run, owner: str) -> None:
    front = LeaseFront()
    with front.serving() as url:
        failed = run("lease", "--gb", "1", "--url", url, "--", "no-such-program")
        front.becomes("ended")
    assert failed.exit_code == 1
    assert "no-such-program" in failed.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "one of --gb and --size"),
        (("--gb", "1", "--size", "1GiB"), "one of --gb and --size"),
        (("--gb", "0"), "more than 0 bytes"),
        (("--gb", "-1"), "more than 0 bytes"),
        (("--gb", "nan"), "more than 0 bytes"),
        (("--gb", "inf"), "more than 0 bytes"),
        (("--size", "3 potatoes"), "'3 potatoes' is not a size"),
        (("--gb", "1", "--signal", "FOO"), "no signal 'FOO'"),
    ],
)
def test_a_lease_that_makes_no_sense_is_refused_before_anything_is_asked(
    front: ScriptedFront, run: Run, words: tuple[str, ...], says: str
) -> None:
    failed = run("lease", *words, "--", "true", COLUMNS="200")
    assert failed.exit_code == 2
    assert says in failed.stderr
    assert not front.requests


def test_a_lease_without_a_command_is_a_mistake(run: Run) -> None:
    assert run("lease", "--gb", "1").exit_code == 2
