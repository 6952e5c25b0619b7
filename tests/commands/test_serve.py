"""`arbiter serve` tells each step by its sign, ends with a box, and ends with its child."""

import json
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.cli.cluster import serve
from deployments.config.start_variables import VARIABLES
from tests.support import scripted_serve_run
from tests.support.command_line import Run


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """As they were before the command set its own."""
    before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    yield
    for name, handler in before.items():
        signal.signal(name, handler)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration of a free port, and a folder for logs."""
    monkeypatch.setenv("ARBITER_LOGS", str(tmp_path / "logs"))
    monkeypatch.delenv("VERBOSE", raising=False)
    monkeypatch.setattr(serve, "SETTLE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    chat = {
        "role": "text",
        "engine": "a:b",
        "models": {"m": {"source": "x", "need": {"weights": 1}}},
    }
    deployments = [{"name": "front", "user_config": {"capabilities": {"chat": chat}}}]
    front = {"name": "front", "import_path": "deployments.app:front", "deployments": deployments}
    config: dict[str, Any] = {"http_options": {"port": port}, "applications": [front]}
    made = tmp_path / "serve_config.yaml"
    made.write_text(yaml.safe_dump(config))
    return made


def behaves(how: str, monkeypatch: pytest.MonkeyPatch, is_checked: bool = False) -> None:
    """Puts the scripted program in place. `is_checked`: the configuration is, by a process that
    takes a second and says the same each time."""
    program = [sys.executable, str(Path(scripted_serve_run.__file__)), how]
    monkeypatch.setattr(serve, "PROGRAM", program)
    if not is_checked:
        monkeypatch.setattr(serve, "_check", lambda *_: None)


@pytest.mark.spec("M1")
def test_box_comes_when_imports_are_done_and_a_signal_ends_all_with_the_childs_status(
    run: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behaves("ready", monkeypatch, is_checked=True)
    done = run("serve", str(file))
    assert done.exit_code == 5
    steps = [line.split()[1] for line in done.stderr.splitlines() if line.startswith("  ok")]
    assert steps == [
        "configuration",
        "Ray",
        "front",
        "arbiter",
        "imports",
        "capabilities",
        "stopping",
    ]
    url = serve.read(file).url
    rule, ready, *rows, empty, curl, end = done.stdout.splitlines()
    assert rule == end == serve.RULE and not empty
    assert ready.startswith("ready after ") and ready.endswith("; Ctrl-C ends it")
    said = {row.split()[0]: row.split(maxsplit=1)[1] for row in rows}
    assert said.keys() == {"API", "dashboard", "log", "serves", "failed"}
    assert said["API"].startswith(f"{url}/v1 (OpenAI)")
    assert (said["dashboard"], said["serves"]) == ("http://127.0.0.1:8265", "chat")
    assert said["failed"] == "tts: torn"
    assert curl.startswith(f"curl -s {url}/v1/chat/completions ") and '"model": "m"' in curl
    assert "Started a local Ray instance" in Path(said["log"]).read_text()
    assert "Ray instance" not in done.output


def test_programs_are_told_the_same_as_json(
    run: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behaves("ready", monkeypatch)
    started = json.loads(run("serve", str(file), "--json").stdout)
    assert (started["url"], started["serves"]) == (serve.read(file).url, ["chat"])
    assert started["ready_s"] > 0 and started["console"] is None


@pytest.mark.spec("M1")
def test_serve_can_be_ended_where_a_shell_began_it_in_the_background(
    run: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behaves("ready", monkeypatch)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert run("serve", str(file)).exit_code == 5


@pytest.mark.spec("M1")
def test_failure_shows_the_last_lines_and_names_the_log(
    run: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behaves("breaks", monkeypatch)
    done = run("serve", str(file))
    assert (done.exit_code, done.stdout) == (7, "")
    *_, words, log = done.stderr.splitlines()
    assert words == "the last words"
    assert log.startswith("`serve run` ended with 7; its log: ")
    assert "the last words" in Path(log.rpartition(" ")[2]).read_text()


def test_child_has_the_variables_unless_the_person_set_one(
    run: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behaves("environment", monkeypatch)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    own = {"RAY_worker_maximum_startup_concurrency": "3"}
    done = run("serve", str(file), **own)
    log = Path(done.stderr.splitlines()[-1].rpartition(" ")[2])
    said = json.loads(log.read_text().splitlines()[-1])
    assert {name: said.get(name) for name in VARIABLES} == VARIABLES | own


@pytest.mark.spec("M1")
def test_zygote_that_cannot_start_is_named_and_the_child_ends(
    run: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behaves("zygote", monkeypatch)
    done = run("serve", str(file))
    assert (done.exit_code, done.stdout) == (1, "")
    assert "no engine can start on n: its zygote does not start: no module" in done.stderr
    configured = serve.read(file)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", configured.port))


@pytest.mark.spec("M1")
def test_front_is_found_wherever_it_stands_among_the_applications(file: Path) -> None:
    before, config = serve.read(file), yaml.safe_load(file.read_text())
    own = {"name": "own", "import_path": "a:b"}
    config["applications"][:0] = [own, {"import_path": "a:c"}]  # Serve has a name for the second
    file.write_text(yaml.safe_dump(config))
    assert serve.read(file) == before


@pytest.mark.spec("M1")
def test_verbose_shows_the_childs_lines(
    run: Run, file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    behaves("breaks", monkeypatch)
    done = run("serve", str(file), VERBOSE="1")
    assert done.exit_code == 7
    assert "Started a local Ray instance" in done.output


def test_port_that_is_taken_is_named_before_anything_starts(run: Run, file: Path) -> None:
    with socket.create_server(("127.0.0.1", serve.read(file).port)):
        done = run("serve", str(file))
    assert done.exit_code == 1
    assert f"something listens at {serve.read(file).url} already" in done.stderr


@pytest.mark.spec("M1")
def test_note_of_a_cluster_that_was_killed_is_struck_and_that_of_a_living_one_stays(
    run: Run, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behaves("breaks", monkeypatch)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    note = tmp_path / "ray" / "ray_current_cluster"
    note.parent.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as living:
        address = f"127.0.0.1:{living.getsockname()[1]}"
        # Another machine's is Ray's to ask.
        for named in (address, "198.51.100.1:6379", "no address", "127.0.0.1:99999", ""):
            note.write_text(named)
            done = run("serve", str(file), RAY_TMPDIR=str(tmp_path))
            assert note.read_text() == named and "has ended" not in done.stderr
    note.write_text(address)
    assert "has ended" not in run("serve", str(file), TMPDIR=str(tmp_path), RAY_ADDRESS="a").stderr
    done = run("serve", str(file), TMPDIR=str(tmp_path), RAY_ADDRESS="")
    assert f"the cluster of Ray at {address} has ended" in done.stderr
    assert done.exit_code == 7 and not note.exists()


def test_configuration_that_must_not_be_deployed_starts_nothing(run: Run, file: Path) -> None:
    file.write_text(file.read_text().replace("role: text", "role: painter"))
    done = run("serve", str(file))
    assert done.exit_code == 1
    assert "no role 'painter'" in done.stderr
    failed = run("serve", str(file.with_name("none.yaml")))
    assert failed.exit_code == 1 and "`arbiter init` writes one" in failed.stderr


def test_old_logs_go(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    for number in range(serve.LOGS_KEPT + 3):
        (folder / f"serve-20200101-0000{number:02}-1.log").touch()
    newest = serve._new_log()
    kept = sorted(folder.iterdir())
    assert len(kept) == serve.LOGS_KEPT and kept[-1] == newest
