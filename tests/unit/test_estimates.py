"""What is guessed of a model of which nothing was measured."""

import pytest

from arbiter.rules import estimates

pytestmark = pytest.mark.spec("A17")


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 16),
        ("Qwen/Qwen3-0.6B", 1.2),
        ("HuggingFaceTB/SmolLM2-135M", 0.27),
        ("mistralai/Mixtral-8x7B-v0.1", 112),
        ("Qwen/Qwen3-30B-A3B-FP8", 30 * 1.12),
        ("TheBloke/Llama-2-13B-AWQ", 6.5 * 1.12),
        ("some/model-fp32-1b", 4),
    ],
)
def test_parameters_in_a_name_and_its_word_for_bits_give_bytes(name: str, gigabytes: float) -> None:
    assert estimates.of_name(name) == pytest.approx(gigabytes * 1e9)


@pytest.mark.parametrize("name", ["small-chat", "all-MiniLM-L6-v2", "gpt-4b2x", "v1.5", "A3B"])
def test_a_name_without_a_number_of_parameters_says_nothing(name: str) -> None:
    assert estimates.of_name(name) is None


def test_files_count_by_their_kind_and_unknown_kinds_not_at_all() -> None:
    sizes = {"a.gguf": 1000, "deep/B.SAFETENSORS": 1000, "README.md": 5000}
    assert estimates.of_files(sizes) == 2400
    assert estimates.of_files({"README.md": 5000}) is None
