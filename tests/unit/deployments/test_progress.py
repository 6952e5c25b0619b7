"""A step is never silent, and says what it took."""

import io
import sys
import threading
from pathlib import Path

import pytest

from deployments.progress import ProgramFailed, Steps, run

FAILS = "print('one'); print('two', flush=True); raise SystemExit(3)"


class Watched(io.StringIO):
    """Tells when a note was told twice."""

    def __init__(self) -> None:
        super().__init__()
        self.is_repeated = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.getvalue().count("Installing vllm") > 1:
            self.is_repeated.set()
        return written


@pytest.mark.spec("M1")
def test_step_that_lasts_repeats_what_it_is_at() -> None:
    out = Watched()
    with Steps(out, silence_s=0.01).step("engines") as note:
        note("Installing vllm")
        assert out.is_repeated.wait(60)
    *others, last = out.getvalue().splitlines()
    assert {line.split()[0] for line in others} == {"..."}
    assert last.split()[:2] == ["ok", "engines"] and last.split()[3] == "s"


@pytest.mark.spec("M1")
def test_step_that_breaks_says_so() -> None:
    out = io.StringIO()
    with pytest.raises(RuntimeError), Steps(out).step("models"):
        raise RuntimeError
    assert out.getvalue().split()[:2] == ["failed", "models"]


@pytest.mark.spec("M1")
@pytest.mark.parametrize("verbose", ["", "1"])
def test_output_of_a_program_goes_to_its_file_and_to_the_terminal_only_if_asked_for(
    verbose: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VERBOSE", verbose)
    notes: list[str] = []
    log = tmp_path / "logs" / "install.log"
    with pytest.raises(ProgramFailed) as caught:
        run([sys.executable, "-c", FAILS], log, notes.append)
    assert (caught.value.status, caught.value.last) == (3, "one\ntwo")
    assert str(log) in str(caught.value)
    assert notes == ["one", "two"] and log.read_text() == "one\ntwo\n"
    assert capsys.readouterr().out == ("one\ntwo\n" if verbose else "")
