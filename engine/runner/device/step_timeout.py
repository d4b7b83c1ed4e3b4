"""How long a step may take before the engine counts as hung, where nobody said so.

Pure. The watch over it is kept from outside, by `client.py`: a stuck process cannot be asked.
"""

from __future__ import annotations

from engine.models.config import ModelConfig

MIN_STEP_TIMEOUT_S = 30.0
"""However small the model: a first step loads code, and a machine may be busy with something else.
"""
LEAST_OPERATIONS_PER_S = {"cpu": 5e9, "cuda": 1e12}
"""A tenth, or less, of what a single modern core or a small GPU does."""


def derive_step_timeout_s(
    model: ModelConfig, device: str, *, max_num_batched_tokens: int, max_model_len: int
) -> float:
    """More than the largest step takes on the slowest machine that one would serve this from."""
    work = max_num_batched_tokens * operations_per_token(model, max_model_len)
    return max(MIN_STEP_TIMEOUT_S, work / LEAST_OPERATIONS_PER_S[device])


def operations_per_token(model: ModelConfig, context: int) -> float:
    """Multiplications and additions for one token behind `context` others, and for its logits."""
    hidden, width = model.hidden_size, model.num_heads * model.head_dim
    projections = hidden * (2 * width + 2 * model.num_kv_heads * model.head_dim)
    layer = projections + 3 * hidden * model.intermediate_size + 2 * width * context
    return 2.0 * (model.depth * layer + hidden * model.vocab_size)
