"""y = x W^T + b with the weight stored the way the device multiplies fastest.

Knows no sharding and no names.

On a CPU a dense weight is copied once into panels for the kernel of `cpu_linear.py`; without that
kernel into oneDNN's blocked layout, 1.1-5 times faster than `F.linear` for every batch of 1 to 512
rows. The result is that of an ordinary product in the same dtype. Quantised weights are made dense
there when they are loaded (their values are kept, rounded to the activations' dtype), because
torch's own products with packed int4 are slower than that at every batch; int8 keeps a second copy
for the smallest batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.backend import uses_triton
from engine.kernels.linear import cpu as cpu_linear
from engine.kernels.linear import deterministic as deterministic_linear
from engine.kernels.linear import fp8 as fp8_linear
from engine.kernels.linear import int4 as int4_linear
from engine.kernels.linear import int8 as int8_linear
from engine.kernels.linear.weights import (
    DenseWeight,
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    LinearWeight,
    dequantise,
    join,
)

LinearKernel = Callable[[Tensor], Tensor]
"""[..., in_features] -> [..., out_features], same dtype."""


def pack_linear(
    weight: Tensor | LinearWeight, bias: Tensor | None, *, deterministic: bool = False
) -> LinearKernel:
    """The product with `weight` [out_features, in_features] and `bias` [out_features] or None.

    `weight` may be kept or copied; the caller drops its own reference. deterministic: a row's bits
    depend neither on the other rows nor on how many there are.
    """
    match weight:
        case Tensor():
            return _pack_dense(weight, bias, deterministic)
        case DenseWeight():
            return _pack_dense(weight.weight, bias, deterministic)
        case Fp8Weight() if fp8_linear.keeps(weight):
            return fp8_linear.pack(weight, bias, deterministic=deterministic)
        case Int8Weight() if uses_triton(weight.values.device):
            return int8_linear.pack(weight, bias, deterministic=deterministic)
        case GroupedWeight() if int4_linear.keeps(weight):
            return int4_linear.pack(weight, bias, deterministic=deterministic)
    dense = _pack_dense(dequantise(weight), bias, deterministic)
    # The product in int8 is another one than that of more rows.
    if isinstance(weight, Int8Weight) and int8_linear.cpu_keeps(weight) and not deterministic:
        return int8_linear.pack_cpu(weight, bias, dense)
    return dense


def pack_parts(
    weights: Sequence[LinearWeight], bias: Tensor | None, *, deterministic: bool = False
) -> LinearKernel:
    """The products of one input with each weight, side by side; one product where that can be."""
    joined = join(weights)
    if joined is not None:
        return pack_linear(joined, bias, deterministic=deterministic)
    kernels = [pack_linear(weight, None, deterministic=deterministic) for weight in weights]

    def product(x: Tensor) -> Tensor:
        y = torch.cat([kernel(x) for kernel in kernels], dim=-1)
        return y if bias is None else y.add_(bias)

    return product


def _pack_dense(weight: Tensor, bias: Tensor | None, deterministic: bool) -> LinearKernel:
    if cpu_linear.cpu_multiplies(weight.dtype, weight.shape[1], weight.device):  # row by row
        return cpu_linear.pack(weight, bias)
    if deterministic and deterministic_linear.has_kernel(weight):
        return deterministic_linear.pack(weight, bias)
    dense = _library_product(weight, bias)
    return deterministic_linear.in_tiles(dense) if deterministic else dense


def _library_product(weight: Tensor, bias: Tensor | None) -> LinearKernel:
    if weight.device.type == "cpu" and _onednn_packs(weight.dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        product = torch.ops.mkldnn._linear_pointwise.default
        return lambda x: product(x, packed, bias, "none", [], "")
    return lambda x: F.linear(x, weight, bias)


def _onednn_packs(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
