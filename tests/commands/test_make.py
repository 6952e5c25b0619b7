"""`make serve` where nothing is installed: which of its steps run, and in which order. Each is a
stand-in that writes down its words; CI installs with the real one, from a fresh clone."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# As tools/install.py does: an environment with what the next steps call.
PYTHON = """#!/bin/sh
echo "$@" >> {record}
test -e {record}.refuses && exit 3
mkdir -p {venv}/bin
for name in python arbiter; do
    printf '#!/bin/sh\\necho %s "$@" >> {record}\\n' $name > {venv}/bin/$name
    chmod +x {venv}/bin/$name
done
"""


@dataclass
class Machine:
    """One with `make` and a Python that has nothing installed."""

    folder: Path

    @property
    def venv(self) -> Path:
        return self.folder / "venv"

    @property
    def record(self) -> Path:
        return self.folder / "record"

    def make(self, *words: str) -> tuple[int, list[str]]:
        """The exit status, and what was called."""
        python = self.folder / "python3"
        python.write_text(PYTHON.format(record=self.record, venv=self.venv))
        python.chmod(0o755)
        self.record.write_text("")
        # The tests may run under `make` themselves, whose words are not meant for this one.
        env = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
        command = ["make", "-s", *words, f"PYTHON={python}", f"VENV={self.venv}"]
        done = subprocess.run(command, cwd=ROOT, env=env, timeout=60, check=False)
        return done.returncode, self.record.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.spec("M1")
def test_make_without_a_target_installs_makes_the_models_and_serves(machine: Machine) -> None:
    install = f"tools/install.py --venv {machine.venv} --device cpu"
    models, serve = "python -m models.make_models", "arbiter serve serve_config.yaml"
    assert machine.make() == (0, [install, models, serve])
    other = "CONFIG=other.yaml"
    assert machine.make("serve", other) == (0, [models, "arbiter serve other.yaml"])


@pytest.mark.spec("M1")
def test_installation_that_fails_ends_make_serve_and_is_begun_again(machine: Machine) -> None:
    refuses = machine.folder / "record.refuses"
    refuses.touch()
    status, called = machine.make("serve")
    assert status != 0 and len(called) == 1
    refuses.unlink()
    status, called = machine.make("serve")
    assert status == 0 and len(called) == 3
