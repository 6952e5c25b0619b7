"""The CPU LoRA kernel against a loop over tokens that is too simple to be wrong."""

import pytest
import torch

from deployments.engines.vllm.adapters.lora_cpu import SegmentedPunica, segments

D_IN, D_OUT, SLOTS, RANK = 24, 20, 5, 8


def wrapper(slots: list[int]) -> SegmentedPunica:
    """One step's metadata, without vLLM's mapping in between."""
    made = SegmentedPunica.__new__(SegmentedPunica)
    index = torch.tensor(slots, dtype=torch.long)
    made.describe(index, index)
    return made


def reference(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, slots: list[int], scale: float
) -> torch.Tensor:
    rows = [
        (b[slot, 0] @ (a[slot, 0] @ row)) * scale if slot >= 0 else torch.zeros(b.shape[2])
        for row, slot in zip(x, slots, strict=True)
    ]
    return torch.stack(rows)


CASES = {
    "one slot": [2] * 7,
    "base alone": [-1] * 4,
    "base between adapters": [0, -1, 1, -1, 4],
    "scattered, gathered": [0, 3, 1, 0, -1, 3, 4, 1],
    "scattered, too many to gather": [i % 6 - 1 for i in range(200)],
    "single token": [4],
    "two adapters": [1, 1, 0, 0, 0],
    "last slot full": [4, 4, -1],
}


@pytest.mark.spec("F10")
@pytest.mark.parametrize("slots", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_linear_layer_equals_the_loop(slots: list[int], scale: float) -> None:
    torch.manual_seed(len(slots))
    x = torch.randn(len(slots), D_IN)
    a = tuple(torch.randn(SLOTS, 1, RANK, D_IN) for _ in range(2))
    b = tuple(torch.randn(SLOTS, 1, D_OUT, RANK) for _ in range(2))
    y = torch.randn(len(slots), 2 * D_OUT)
    expected = y + torch.cat([reference(x, a[i], b[i], slots, scale) for i in range(2)], dim=1)
    wrapper(slots).add_lora_linear(y, x, a, b, scale, (D_OUT, D_OUT))
    assert torch.allclose(y, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.spec("F10")
@pytest.mark.parametrize("slots", CASES.values(), ids=CASES.keys())
def test_logits_and_embeddings_equal_the_loop(slots: list[int]) -> None:
    torch.manual_seed(1)
    a, b = torch.randn(SLOTS, 1, RANK, D_IN), torch.randn(SLOTS, 1, D_OUT, RANK)
    x, inner = torch.randn(len(slots), D_IN), torch.randn(len(slots), RANK)
    logits, embedded = torch.zeros(len(slots), D_OUT), torch.zeros(len(slots), D_OUT)
    one = wrapper(slots)
    one.add_lora_logits(logits, x, a, b, 2.0)
    one.add_lora_embedding(embedded, inner, b)
    identity = torch.eye(RANK).expand(SLOTS, 1, RANK, RANK)
    assert torch.allclose(logits, reference(x, a, b, slots, 2.0), atol=1e-5, rtol=1e-5)
    assert torch.allclose(embedded, reference(inner, identity, b, slots, 1.0), atol=1e-5)


def test_lora_kernel_in_bf16_stays_within_its_rounding() -> None:
    torch.manual_seed(2)
    slots = CASES["scattered, gathered"]
    x, a, b = (
        torch.randn(*shape)
        for shape in ((len(slots), D_IN), (SLOTS, 1, RANK, D_IN), (SLOTS, 1, D_OUT, RANK))
    )
    half = torch.zeros(len(slots), D_OUT, dtype=torch.bfloat16)
    low = (a.bfloat16(),), (b.bfloat16(),)
    wrapper(slots).add_lora_linear(half, x.bfloat16(), *low, 1.0, (D_OUT,))
    expected = reference(x, a, b, slots, 1.0)
    assert (half.float() - expected).abs().max() <= 1.6e-2 * expected.abs().max()


def test_no_tokens_make_no_segments() -> None:
    assert segments(torch.tensor([], dtype=torch.long)) == []
    assert segments(torch.tensor([-1, -1])) == []
