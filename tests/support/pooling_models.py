"""Tiny encoders of random weights that score pairs or classify texts, for vLLM and transformers."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification


def make_encoder(folder: Path, words: Path, labels: tuple[str, ...]) -> Path:
    """A BERT with a classification head: of one label a cross-encoder, which scores a pair.
    `words`: a model with the tokenizer to use."""
    torch.manual_seed(len(labels))
    tokenizer = AutoTokenizer.from_pretrained(words)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,  # wide, so that scores differ
        id2label=dict(enumerate(labels)),
        label2id={label: number for number, label in enumerate(labels)},
    )
    made: Any = BertForSequenceClassification
    made(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def logits(folder: Path, texts: list[str], pairs: list[str] | None = None) -> torch.Tensor:
    """By transformers: [texts, labels]; of each text with its pair where there are pairs."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = BertForSequenceClassification.from_pretrained(folder)
    model.eval()
    logits = []
    with torch.inference_mode():
        for number, text in enumerate(texts):
            both = (text,) if pairs is None else (text, pairs[number])
            logits.append(model(**tokenizer(*both, return_tensors="pt")).logits[0])
    return torch.stack(logits)
