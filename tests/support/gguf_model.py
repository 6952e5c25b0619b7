"""A GGUF model of random weights, small enough to be made in each test that wants one."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType

LAYERS, HIDDEN, INNER, HEADS, CONTEXT = 2, 64, 128, 4, 512
SPECIAL = ["<unk>", "<s>", "</s>"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def write(file: Path) -> Path:
    """A Llama that reads bytes and answers in small letters: its vocabulary is the 256 bytes and
    three special tokens, and tokens other than letters have no logit above 0."""
    writer = GGUFWriter(file, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    special = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    writer.add_token_types([*special, *([TokenType.BYTE] * 256)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, shape in shapes(len(tokens)).items():
        made = weights(shape)
        if name == "output":  # llama-server refuses answers that are not text
            made[: len(SPECIAL) + ord("a")] = made[len(SPECIAL) + ord("z") + 1 :] = 0
        writer.add_tensor(f"{name}.weight", made)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def shapes(vocabulary: int) -> dict[str, tuple[int, ...]]:
    square, wide = (HIDDEN, HIDDEN), (INNER, HIDDEN)
    layer = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), square)
    layer |= {"ffn_gate": wide, "ffn_up": wide, "ffn_down": (HIDDEN, INNER)}
    shapes: dict[str, tuple[int, ...]] = {
        f"blk.{number}.{name}": shape for number in range(LAYERS) for name, shape in layer.items()
    }
    norms = [f"blk.{n}.{name}" for n in range(LAYERS) for name in ("attn_norm", "ffn_norm")]
    shapes |= dict.fromkeys([*norms, "output_norm"], (HIDDEN,))
    return shapes | dict.fromkeys(("token_embd", "output"), (vocabulary, HIDDEN))


def weights(shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return np.random.default_rng(shape).normal(0, 0.3, shape).astype(np.float32)
