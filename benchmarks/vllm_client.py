"""vLLM's own benchmark client, unchanged, as load on the whole graph.

    python -m benchmarks.vllm_client --model tiny-chat --prompts 128 --concurrency 16

What it measures is its own affair (`vllm bench serve`); that every request it sends is answered is
what is asserted here.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import report, servers
from benchmarks.throughput import graph_config
from deployments.config import load_plan

# The `vllm` script of the CPU distribution stops at looking up its own version; this is what it
# would call.
CLIENT = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "p = argparse.ArgumentParser(); add_cli_args(p); main(p.parse_args())"
)
KEPT = (
    "completed",
    "failed",
    "duration",
    "request_throughput",
    "output_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_tpot_ms",
    "p99_tpot_ms",
)


def load(url: str, args: argparse.Namespace) -> dict[str, Any]:
    """One run of the client; its own result."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", CLIENT, "--backend", "openai-chat"]
        command += ["--base-url", url, "--endpoint", "/v1/chat/completions"]
        command += ["--model", args.model, "--tokenizer", load_plan.resolve(f"made:{args.model}")]
        command += ["--dataset-name", "random", "--random-input-len", "64"]
        command += ["--random-output-len", str(args.tokens), "--num-prompts", str(args.prompts)]
        command += ["--max-concurrency", str(args.concurrency), "--ignore-eos"]
        command += ["--seed", str(args.seed), "--disable-tqdm", "--num-warmups", "2"]
        command += ["--save-result", "--result-dir", folder, "--result-filename", "run.json"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result: dict[str, Any] = json.loads((Path(folder) / "run.json").read_text())
    return {name: result[name] for name in KEPT if name in result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-chat")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--port", type=int, default=18_642)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with servers.our_graph(graph_config(args.model, args.port), "default") as url:
        figures = load(url, args)
    assert figures["completed"] == args.prompts, figures
    report.write("vllm_client", figures, args.seed, args.model)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
