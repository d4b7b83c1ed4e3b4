"""The KV cache's memory: how large a block is, how many fit, and the tensors.

Knows block ids as numbers only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from engine.errors import ConfigError
from engine.kernels.attention.types import AttentionShape, KVLayer, KVScales
from engine.kernels.linear.fp8 import reads_fp8
from engine.layers.parallel import share
from engine.models.decoder import Decoder
from engine.models.encoder import Encoder

FLOAT8_NAN = 0x7F
"""The bits of the one number in e4m3fn that is none (OCP 8-bit floating point)."""


def attention_shape(
    model: Decoder | Encoder,
    block_size: int,
    *,
    cache_dtype: Literal["auto", "fp8"] = "auto",
    deterministic: bool = False,
) -> AttentionShape:
    """Return what the model's layers share on this rank. Raises ConfigError when the device's
    kernels do not read such a cache.
    """
    if cache_dtype == "fp8" and model.device.type == "cuda" and not reads_fp8(model.device):
        raise ConfigError(f"kv_cache_dtype is fp8, which {model.device} has no instructions for")
    config = model.config
    return AttentionShape(
        num_heads=share(config.num_heads, model.group, "num_attention_heads"),
        num_kv_heads=share(config.num_kv_heads, model.group, "num_key_value_heads"),
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=model.dtype,
        device=model.device,
        cache_dtype=torch.float8_e4m3fn if cache_dtype == "fp8" else None,
        deterministic=deterministic,
    )


def kv_bytes_per_token(shape: AttentionShape, num_layers: int) -> int:
    """Keys and values of all layers."""
    stored = (shape.cache_dtype or shape.dtype).itemsize
    return 2 * num_layers * shape.num_kv_heads * shape.head_dim * stored


def part_bytes(shape: AttentionShape, num_layers: int) -> list[int]:
    """Return the bytes of a block in each tensor of a cache: keys and values, layer by layer."""
    stored = (shape.cache_dtype or shape.dtype).itemsize
    return [shape.num_kv_heads * shape.block_size * shape.head_dim * stored] * (2 * num_layers)


def allocate_kv_cache(
    shape: AttentionShape,
    num_layers: int,
    num_blocks: int,
    scales: Sequence[KVScales | None] = (),
    parts: Iterator[memoryview] | None = None,
) -> list[KVLayer]:
    """One `KVLayer` a layer. The memory is not touched: the system hands it out as it is used.

    scales: by layer, read where the cache is float8. A layer without any gets 1: e4m3 holds what
    keys and values of most trained models are. parts: the memory of each tensor, keys before
    values, on a CPU; None: of the device."""
    size = (num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
    dtype = shape.cache_dtype or shape.dtype

    def tensor() -> torch.Tensor:
        if parts is not None:
            return torch.frombuffer(next(parts), dtype=dtype).view(size)
        return torch.empty(size, dtype=dtype, device=shape.device)

    if dtype != torch.float8_e4m3fn:
        return [KVLayer(tensor(), tensor()) for _ in range(num_layers)]
    ones = torch.ones(shape.num_kv_heads, dtype=torch.float32, device=shape.device)
    found = list(scales) or [None] * num_layers
    assert len(found) == num_layers
    return [KVLayer(tensor(), tensor(), *(each or (ones.clone(), ones.clone()))) for each in found]


def poison_block(cache: Sequence[KVLayer], block: int) -> None:
    """Overwrite what a freed block holds with numbers that are none: whoever reads it before it was
    written says so. Steps in flight are not harmed, the device does one thing after the other."""
    for layer in cache:
        for stored in (layer.k[block], layer.v[block]):
            if stored.dtype == torch.float8_e4m3fn:
                stored.view(torch.uint8).fill_(FLOAT8_NAN)
            else:
                stored.fill_(torch.nan)
