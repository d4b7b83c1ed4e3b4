"""The scales of a float8 KV cache as published checkpoints store them.

Knows names and shapes, nothing of the cache. Beside an attention layer's name, where `k` stands for
either of k and v:

    k_scale                llm-compressor, Quark and AutoFP8
    k_proj.k_scale         ModelOpt
    k_proj.output_scale    compressed-tensors before it named them k_scale
    kv_scale               one for both

Each is one number, of whatever shape, or one for each KV head. All mean that what is stored in the
cache, times the scale, is the key. Nobody needs them where the cache is not float8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.kernels.attention.types import KVScales
from engine.layers.parallel import Shard
from engine.weights.quantization import FLOAT_DTYPES, Tensors

NAMES = ("{0}_scale", "{0}_proj.{0}_scale", "{0}_proj.output_scale", "kv_scale")


def read_kv_scales(tensors: Tensors, name: str, num_kv_heads: int, shard: Shard) -> KVScales | None:
    """Return the scales of this rank's heads; None where nothing is stored. Raises ConfigError when
    one of the two is missing, has another shape or is no scale.
    """
    stored = [_stored(tensors, name, which) for which in "kv"]
    if stored == [None, None]:
        return None
    absent = next((which for which, found in zip("kv", stored, strict=True) if not found), None)
    if absent is not None:
        raise ConfigError(f"{name} has a scale for its cache, but {absent}_scale is missing")
    k, v = (_read(tensors, str(found), num_kv_heads, shard) for found in stored)
    return KVScales(k, v)


def _stored(tensors: Tensors, name: str, which: str) -> str | None:
    names = (f"{name}.{form.format(which)}" for form in NAMES)
    return next((each for each in names if tensors.dtype_of(each) is not None), None)


def _read(tensors: Tensors, name: str, num_kv_heads: int, shard: Shard) -> Tensor:
    shape = tensors.shape_of(name)
    if shape is None or torch.Size(shape).numel() not in (1, num_kv_heads):
        shape = (num_kv_heads,)
    scale = tensors.take_stored(name, shape, FLOAT_DTYPES).float().reshape(-1)
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise ConfigError(f"{name} is not a scale: {scale.tolist()}")
    own = scale.expand(num_kv_heads).chunk(shard.parts)[shard.place]
    return own.contiguous()
