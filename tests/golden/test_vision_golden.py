"""What vLLM says of pictures against transformers called directly, both in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
)

from models.train_vision import QUESTIONS, TOKENS, prompt_of
from tests.support.drawings import drawing, uri
from tests.support.engine_host import ZygoteUnderTest, is_gone, until

VLLM = "deployments.engines.vllm.engine:build"
NUMBERS, MOST_TOKENS = range(3, 224, 20), 14
ARGS = {
    "dtype": "float32",
    "max_model_len": 512,
    "kv_cache_memory_bytes": 32 << 20,
    "limit_mm_per_prompt": {"image": 2},
}


@pytest.mark.spec("H2")
def test_answers_and_their_probabilities_equal_transformers(
    engines: ZygoteUnderTest, describer: Path
) -> None:
    own = [by_transformers(describer, NUMBERS, question[0]) for question in QUESTIONS.values()]
    config = {"model": str(describer), "served_name": "m", "engine_args": ARGS, "threads": 1}
    child = engines.spawn("golden-vision", VLLM, config).hold()
    assert child.ready()[0] == 200
    for (question, *_), wanted in zip(QUESTIONS.values(), own, strict=True):
        for number, (text, logprobs) in zip(NUMBERS, wanted, strict=True):
            picture = {"type": "image_url", "image_url": {"url": uri(drawing(number))}}
            content = [picture, {"type": "text", "text": question}]
            asked = {
                "messages": [{"role": "user", "content": content}],
                "temperature": 0,
                "max_tokens": MOST_TOKENS,
                "logprobs": True,
            }
            status, said = child.call("POST", "/v1/chat/completions", asked)
            assert status == 200, said
            [choice] = said["choices"]
            assert choice["message"]["content"] == text
            found = [token["logprob"] for token in choice["logprobs"]["content"]]
            assert found[: len(logprobs)] == pytest.approx(logprobs, abs=2e-4)
    child.let_go()
    until(lambda: is_gone(child.pid), 5)


def by_transformers(model: Path, numbers: range, question: str) -> list[tuple[str, list[float]]]:
    """The text of each greedy answer, and the log-probability of each of its tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    processor: Any = Idefics3Processor(
        Idefics3ImageProcessorPil.from_pretrained(model), tokenizer, image_seq_len=TOKENS
    )
    describes = Idefics3ForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()
    found = []
    for number in numbers:
        inputs = processor(
            text=prompt_of(processor, question), images=[drawing(number)], return_tensors="pt"
        )
        with torch.inference_mode():
            said = describes.generate(
                **inputs,
                max_new_tokens=MOST_TOKENS,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        tokens = said.sequences[0, inputs["input_ids"].shape[1] :]
        logprobs = [
            torch.log_softmax(logits[0], -1)[token].item()
            for logits, token in zip(said.logits, tokens, strict=True)
        ]
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        found.append((text, logprobs))
    return found
