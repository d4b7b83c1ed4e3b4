"""Sizes an engine: KV blocks, context, steps in flight, the time after which a step hangs.

Knows what was asked, what the checkpoint says and what a step takes; loads and allocates nothing.
"""

from __future__ import annotations

import logging

import torch

from engine.config import BLOCK_SIZE, EngineConfig
from engine.errors import ConfigError
from engine.kernels.attention.types import AttentionShape
from engine.kv_cache.prefix_cache import max_blocks_per_sequence
from engine.models.config import ModelConfig
from engine.runner.memory.free_memory import free_bytes
from engine.transport.startup import GIB, Startup

logger = logging.getLogger(__name__)

MIN_STEP_TIMEOUT_S = 30.0
"""The least timeout of any model: a first step loads code, and a machine may be busy."""
LEAST_OPERATIONS_PER_S = {"cpu": 5e9, "cuda": 1e12}
"""At most a tenth of the speed of one modern core or a small GPU."""


def max_steps_in_flight_of(config: EngineConfig, device: torch.device) -> int:
    speculates = config.speculative != "off"
    if config.run_ahead and speculates:
        raise ConfigError(
            "run_ahead and speculative exclude each other: a guess needs the last token"
        )
    if config.run_ahead is None:
        return 2 if device.type == "cuda" and not speculates else 1
    return 2 if config.run_ahead else 1


def max_model_len_of(
    config: EngineConfig, model: ModelConfig, num_blocks: int, max_steps_in_flight: int
) -> int:
    """As asked, or the checkpoint's, cut to what the blocks hold of one sequence."""
    longest = model.max_model_len
    if model.encoder is not None:  # a text is computed whole
        longest = min(longest, config.max_num_batched_tokens)
    asked = config.max_model_len or longest
    if not 2 <= asked <= longest:
        raise ConfigError(f"max_model_len {asked} must be between 2 and the checkpoint's {longest}")
    needed = max_blocks_per_sequence(
        asked,
        block_size=BLOCK_SIZE,
        sliding_window=model.sliding_window,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_steps_in_flight=max_steps_in_flight,
    )
    if needed <= num_blocks:
        return asked
    capacity = num_blocks * BLOCK_SIZE
    logger.warning("max_model_len cut from %d to the %d tokens of KV cache", asked, capacity)
    return capacity


def num_unkept_blocks_of(config: EngineConfig, max_steps_in_flight: int) -> int:
    """Return as many blocks as steps can ask for, where nothing is kept and a block is only a
    number.
    """
    per_step = -(-config.max_num_batched_tokens // BLOCK_SIZE) + config.max_num_seqs
    return config.num_blocks or per_step * max_steps_in_flight


def num_blocks_of(
    config: EngineConfig,
    shape: AttentionShape,
    bytes_per_token: int,
    step_bytes: int,
    startup: Startup,
) -> int:
    """num_blocks as asked, or as many as fit in kv_cache_bytes or the fraction of what is free
    beside a step. ConfigError on CUDA when what was asked leaves a step too little; host memory
    is taken as it is used, and may be free by then."""
    block_bytes = bytes_per_token * BLOCK_SIZE
    free = free_bytes(shape.device)
    room = config.kv_cache_bytes
    if room is None:
        room = int(max(0, free - step_bytes) * config.kv_cache_fraction)
    num_blocks = room // block_bytes if config.num_blocks is None else config.num_blocks
    if num_blocks < 1:
        raise ConfigError(
            f"no KV block fits: {room} bytes are allowed, a block of {BLOCK_SIZE} tokens takes "
            f"{block_bytes}; {free} bytes are free, a step takes up to {step_bytes}"
        )
    size = num_blocks * block_bytes
    if size + step_bytes > free:
        what = (
            f"a KV cache of {size / GIB:.2f} GiB and a step of up to {step_bytes / GIB:.2f} GiB "
            f"do not fit in the {free / GIB:.2f} GiB that are free on {shape.device}"
        )
        if shape.device.type == "cuda":
            raise ConfigError(what)
        logger.warning("%s", what)
    tokens = num_blocks * BLOCK_SIZE
    startup.took("KV cache", size, f"{num_blocks} blocks, {tokens} tokens of {bytes_per_token} B")
    startup.took("a step, at most", step_bytes)
    startup.took("free beside them", free - size - step_bytes, f"of {free / GIB:.2f} GiB")
    return num_blocks


def derive_step_timeout_s(
    model: ModelConfig, device: str, *, max_num_batched_tokens: int, max_model_len: int
) -> float:
    """Return a time that the largest step never takes, on the slowest machine that may serve it: a
    longer one means that the engine hangs. The client watches it, since a stuck process cannot."""
    work = max_num_batched_tokens * operations_per_token(model, max_model_len)
    return max(MIN_STEP_TIMEOUT_S, work / LEAST_OPERATIONS_PER_S[device])


def operations_per_token(model: ModelConfig, context: int) -> float:
    """Count the multiplications and additions for a token after `context` others."""
    hidden, width = model.hidden_size, model.num_heads * model.head_dim
    projections = hidden * (2 * width + 2 * model.num_kv_heads * model.head_dim)
    layer = projections + 3 * hidden * model.intermediate_size + 2 * width * context
    return 2.0 * (model.depth * layer + hidden * model.vocab_size)
