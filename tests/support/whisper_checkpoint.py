"""A Whisper model of CTranslate2 as a checkpoint of `transformers`, which vLLM loads."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from models.ctranslate2_int8 import read

END = "<|endoftext|>"


def convert(source: Path, target: Path) -> Path:
    """Writes the model in `source` to `target`."""
    from transformers import WhisperConfig, WhisperFeatureExtractor

    values, _ = read(source / "model.bin")
    layers = sum(name.endswith("/self_attention/linear_0/weight") for name in values) // 2
    width = values["decoder/embeddings/weight"].shape[1]
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    target.mkdir()
    save_file(_Renamed(values).whole(layers), target / "model.safetensors", {"format": "pt"})
    WhisperConfig(
        vocab_size=values["decoder/embeddings/weight"].shape[0],
        num_mel_bins=values["encoder/conv1/weight"].shape[1],
        d_model=width,
        encoder_layers=layers, decoder_layers=layers,
        encoder_attention_heads=int(values["encoder/num_heads"]),
        decoder_attention_heads=int(values["decoder/num_heads"]),
        encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width,
        max_target_positions=values["decoder/position_encodings/encodings"].shape[0],
        architectures=["WhisperForConditionalGeneration"],
        dtype="float32",
        decoder_start_token_id=ids["<|startoftranscript|>"],
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), ids[END]),
    ).save_pretrained(target)  # fmt: skip
    WhisperFeatureExtractor().save_pretrained(target)
    shutil.copy(source / "tokenizer.json", target)
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), END)
    classes = {"tokenizer_class": "WhisperTokenizer", "processor_class": "WhisperProcessor"}
    (target / "tokenizer_config.json").write_text(json.dumps(special | classes))
    return target


class _Renamed:
    """The weights, in float32, by the names of `transformers`."""

    def __init__(self, values: dict[str, np.ndarray]) -> None:
        self.values = values
        self.tensors: dict[str, np.ndarray] = {}

    def whole(self, layers: int) -> dict[str, np.ndarray]:
        self._put("decoder/embeddings/weight", "decoder.embed_tokens.weight")
        for number in (1, 2):
            self._linear(f"encoder/conv{number}", f"encoder.conv{number}")
        for side in ("encoder", "decoder"):
            self._put(f"{side}/position_encodings/encodings", f"{side}.embed_positions.weight")
            self._norm(f"{side}/layer_norm", f"{side}.layer_norm")
            for number in range(layers):
                theirs, ours = f"{side}/layer_{number}", f"{side}.layers.{number}"
                self._own_attention(f"{theirs}/self_attention", ours)
                if side == "decoder":
                    self._attention_to_sound(f"{theirs}/attention", ours)
                self._norm(f"{theirs}/ffn/layer_norm", f"{ours}.final_layer_norm")
                self._linear(f"{theirs}/ffn/linear_0", f"{ours}.fc1")
                self._linear(f"{theirs}/ffn/linear_1", f"{ours}.fc2")
        return self.tensors

    def _own_attention(self, theirs: str, ours: str) -> None:
        self._norm(f"{theirs}/layer_norm", f"{ours}.self_attn_layer_norm")
        self._fused(f"{theirs}/linear_0", f"{ours}.self_attn", "q_proj", "k_proj", "v_proj")
        self._linear(f"{theirs}/linear_1", f"{ours}.self_attn.out_proj")

    def _attention_to_sound(self, theirs: str, ours: str) -> None:
        self._norm(f"{theirs}/layer_norm", f"{ours}.encoder_attn_layer_norm")
        self._linear(f"{theirs}/linear_0", f"{ours}.encoder_attn.q_proj")
        self._fused(f"{theirs}/linear_1", f"{ours}.encoder_attn", "k_proj", "v_proj")
        self._linear(f"{theirs}/linear_2", f"{ours}.encoder_attn.out_proj")

    def _put(self, theirs: str, ours: str) -> None:
        self.tensors[f"model.{ours}"] = self.values[theirs].astype(np.float32)

    def _linear(self, theirs: str, ours: str) -> None:
        self._put(f"{theirs}/weight", f"{ours}.weight")
        self._put(f"{theirs}/bias", f"{ours}.bias")

    def _norm(self, theirs: str, ours: str) -> None:
        self._put(f"{theirs}/gamma", f"{ours}.weight")
        self._put(f"{theirs}/beta", f"{ours}.bias")

    def _fused(self, theirs: str, ours: str, *names: str) -> None:
        """Projections in one matrix; that of keys has no bias in Whisper."""
        for kind in ("weight", "bias"):
            parts = np.split(self.values[f"{theirs}/{kind}"].astype(np.float32), len(names))
            for name, part in zip(names, parts, strict=True):
                if (kind, name) != ("bias", "k_proj"):
                    self.tensors[f"model.{ours}.{name}.{kind}"] = np.ascontiguousarray(part)
