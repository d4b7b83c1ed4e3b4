"""Workloads that engines are asked for on a CPU, and of which shapes: prompts of random tokens,
answers of a fixed length."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SMOLLM2_135M: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
SMALL_15M: dict[str, Any] = {
    "hidden_size": 288,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
SEED = 2024


@dataclass(frozen=True, slots=True)
class Request:
    prompt: list[int]
    num_output_tokens: int


def mixed(num_requests: int, *, seed: int = SEED) -> list[Request]:
    """Prompts of 32-512 tokens, answers of 16-256."""
    rng = random.Random(seed)
    return [
        Request(tokens(rng, rng.randint(32, 512)), rng.randint(16, 256))
        for _ in range(num_requests)
    ]


def alike(num_requests: int, prompt: int, answer: int, *, seed: int) -> list[Request]:
    rng = random.Random(seed)
    return [Request(tokens(rng, prompt), answer) for _ in range(num_requests)]


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(SMALL_15M["vocab_size"]) for _ in range(count)]


def build_checkpoint(folder: Path, shape: dict[str, Any], dtype: str) -> None:
    import transformers  # not for those who only read the shapes: slow, and not on every machine

    torch.manual_seed(SEED)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
