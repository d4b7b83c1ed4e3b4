"""Tiny checkpoints of every supported family, written by `transformers`, and what it generates from
them: the reference of the parity tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB = 199
"""No power of two and no multiple of anything the engine works in."""
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ORIGINAL_LENGTH, SCALED_LENGTH = 32, 128
"""Tokens that the models of `SCALED_ROPE` were made for, and that they are stretched to."""
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": SCALED_LENGTH / ORIGINAL_LENGTH,
    "original_max_position_embeddings": ORIGINAL_LENGTH,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + i / 16 for i in range(8)],
    "long_factor": [1.0 + i * i / 4 for i in range(8)],
    "original_max_position_embeddings": ORIGINAL_LENGTH,
}
WINDOW = 24


def _llama(**changes: Any) -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SHAPE | changes)))


def _mistral(**changes: Any) -> transformers.PreTrainedModel:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**(SHAPE | changes)))


def _qwen2(**changes: Any) -> transformers.PreTrainedModel:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**(SHAPE | changes)))


def _qwen3(**changes: Any) -> transformers.PreTrainedModel:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**(SHAPE | changes)))


def _mixtral(**changes: Any) -> transformers.PreTrainedModel:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**(SHAPE | experts | changes))
    )


def _qwen3_moe(**changes: Any) -> transformers.PreTrainedModel:
    experts = {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "head_dim": 16,
    }
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**(SHAPE | experts | changes))
    )


def _phi3(**changes: Any) -> transformers.PreTrainedModel:
    """`partial_rotary_factor` stands beside the rope parameters in the folders of Phi-4-mini."""
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**(SHAPE | changes)))


MODELS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "llama2": lambda: _llama(num_key_value_heads=4, tie_word_embeddings=False),
    "llama2_linear_rope": lambda: _llama(
        rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    ),
    "llama3": lambda: _llama(rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
    "llama_biases": lambda: _llama(attention_bias=True, mlp_bias=True),
    "mistral_window": lambda: _mistral(sliding_window=WINDOW, head_dim=24),
    "mistral_full": lambda: _mistral(sliding_window=None),
    "qwen2_tied": lambda: _qwen2(tie_word_embeddings=True),
    "qwen2_mixed_windows": lambda: _qwen2(
        use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "mistral_wide": lambda: _mistral(sliding_window=WINDOW, head_dim=32),
    "qwen3": lambda: _qwen3(head_dim=32, tie_word_embeddings=False),
    "qwen3_tied": lambda: _qwen3(head_dim=16, tie_word_embeddings=True),
    "mixtral": _mixtral,
    "mixtral_window": lambda: _mixtral(sliding_window=WINDOW, num_local_experts=3),
    "phi3": lambda: _phi3(sliding_window=WINDOW),
    "phi3_partly_rotated": lambda: _phi3(
        num_attention_heads=2,
        num_key_value_heads=2,
        partial_rotary_factor=0.75,
    ),
    "qwen3_moe": lambda: _qwen3_moe(norm_topk_prob=True),
    "qwen3_moe_some_layers": lambda: _qwen3_moe(
        mlp_only_layers=[1], norm_topk_prob=False, tie_word_embeddings=True
    ),
    "qwen3_moe_every_second": lambda: _qwen3_moe(decoder_sparse_step=2),
}

SCALED_ROPE: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    # As Qwen2.5's cards say it: max_position_embeddings stays the original length.
    "qwen2_yarn": lambda: _qwen2(
        rope_parameters=dict(YARN_ROPE), max_position_embeddings=ORIGINAL_LENGTH
    ),
    "qwen3_yarn": lambda: _qwen3(
        head_dim=16,
        rope_parameters=YARN_ROPE
        | {"beta_fast": 4.0, "beta_slow": 0.5, "mscale": 1.4, "mscale_all_dim": 0.7}
        | {"truncate": False},
        max_position_embeddings=SCALED_LENGTH,
    ),
    "llama_dynamic_rope": lambda: _llama(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
        max_position_embeddings=ORIGINAL_LENGTH,
    ),
    "phi3_longrope": lambda: _phi3(
        num_attention_heads=3,
        hidden_size=72,
        num_key_value_heads=1,
        rope_parameters=LONG_ROPE | {"partial_rotary_factor": 2 / 3},
        max_position_embeddings=SCALED_LENGTH,
        original_max_position_embeddings=ORIGINAL_LENGTH,
    ),
    "llama_longrope": lambda: _llama(
        rope_parameters=dict(LONG_ROPE), max_position_embeddings=SCALED_LENGTH
    ),
}
"""Rotations that serve texts longer than `ORIGINAL_LENGTH`."""


@cache
def build(name: str) -> transformers.PreTrainedModel:
    """The model with weights spread so widely that its text is neither constant nor a coin toss."""
    torch.manual_seed(sum(name.encode()))
    model = (MODELS | SCALED_ROPE)[name]().eval()
    model.generation_config.eos_token_id = None  # `generate` goes on to the end
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=1.6 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.3)
        # Tied or not, embeddings of unit variance keep neighbours apart.
        model.get_input_embeddings().weight.normal_(std=1.0 / SHAPE["hidden_size"] ** 0.25)
    return model


def save(name: str, folder: Path, *, max_shard_size: str = "1GB") -> Path:
    """Write `name` as a Hugging Face folder and return it."""
    build(name).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def generate(name: str, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The greedy continuation, EOS or not."""
    return list(_generate(name, tuple(prompt), max_tokens))


@cache
@torch.inference_mode()
def _generate(name: str, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    output = build(name).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        generation_config=transformers.GenerationConfig(max_new_tokens=max_tokens, do_sample=False),
    )
    found: list[int] = output[0, len(prompt) :].tolist()
    return found


@torch.inference_mode()
def repeat(name: str, prompt: Sequence[int], text: Sequence[int]) -> list[int]:
    """The greedy token after each prefix of `text` behind its prompt, in one pass instead of one a
    token: `text` itself if it is what `generate` returns."""
    rows = build(name)(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
    found: list[int] = rows.argmax(dim=-1).tolist()
    return found


@torch.inference_mode()
def hidden(name: str, token_ids: Sequence[int]) -> Tensor:
    """float32 [len(token_ids), hidden] behind the final norm"""
    return build(name).model(torch.tensor([list(token_ids)])).last_hidden_state[0].float()


@torch.inference_mode()
def logits(name: str, token_ids: Sequence[int]) -> Tensor:
    """float32 [len(token_ids), vocab]"""
    return build(name)(torch.tensor([list(token_ids)])).logits[0].float()
