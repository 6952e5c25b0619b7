"""vLLM as its manual says, without a line of ours: greedy tokens for prompts, as JSON.

python tests/golden/plain_vllm.py MODEL '[[1, 2, 3], ...]' TOKENS
"""

import json
import os
import sys

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
)


def main(model: str, prompts: str, count: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=1024,
        distributed_executor_backend="uni",
    )
    greedy = SamplingParams(temperature=0, max_tokens=int(count), ignore_eos=True)
    inputs = [{"prompt_token_ids": ids} for ids in json.loads(prompts)]
    outputs = llm.generate(inputs, greedy, use_tqdm=False)
    print("TOKENS", json.dumps([list(o.outputs[0].token_ids) for o in outputs]))


if __name__ == "__main__":
    main(*sys.argv[1:])
