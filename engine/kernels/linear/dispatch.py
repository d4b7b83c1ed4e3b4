"""y = x W^T + b with the weight stored the way the device multiplies fastest.

Knows no sharding and no names.

On a CPU a dense weight is copied once into panels for the kernels of `cpu.py`; without those
kernels into oneDNN's blocked layout, 1.1-5 times faster than `F.linear` for every batch of 1 to 512
rows. The result is that of an ordinary product in the same dtype. Quantised weights are made dense
there when they are loaded (their values are kept, rounded to the activations' dtype), because
torch's own products with packed int4 are slower than that at every batch; int8 keeps a second copy
for the smallest batches: widening costs more than it saves where a weight in the cache serves many
rows.

Deterministic, a row's bits depend on that row and the weight alone. Otherwise they may depend on
how many rows there are, too: on a CPU, which product multiplies is measured by classes of rows, and
deterministic it is our own tiles, always. Libraries choose a kernel, and
with it an order of sums, by the number of rows: oneDNN's float32 product of 1,536 inputs gives a
row other bits in a batch of 17 than alone. A kernel of one shape keeps one order. With kernels on a
CPU and on a GPU that is one of our own; elsewhere the library's, which is given tiles of TILE_ROWS
rows only. That no row's place in a tile shows either is not promised by oneDNN; it was tried for
float32, bfloat16 and float16, and a test tries it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.backend import uses_triton
from engine.kernels.linear import cpu as cpu_linear
from engine.kernels.linear import fp8 as fp8_linear
from engine.kernels.linear import int4 as int4_linear
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
INT8_ROWS = 4
"""Up to so many rows a processor's product in int8 is the faster one."""
TILE_ROWS = 16


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
            return _by_rows(fp8_linear.pack(weight, bias, deterministic=deterministic))
        case Int8Weight() if uses_triton(weight.values.device):
            from engine.kernels.linear.int8_triton import multiply

            # Read as int8 and widened in registers: a decode waits for bytes.
            by_kernel = partial(multiply, weight=weight, bias=bias, deterministic=deterministic)
            return _by_rows(by_kernel)
        case GroupedWeight() if int4_linear.keeps(weight):
            return _by_rows(int4_linear.pack(weight, bias, deterministic=deterministic))
    dense = _pack_dense(dequantise(weight), bias, deterministic)
    if deterministic or not isinstance(weight, Int8Weight):
        return dense
    size, device = weight.values.shape[1], weight.values.device
    if not cpu_linear.cpu_multiplies(weight.dtype, size, device):
        return dense
    # The product in int8 is another one than that of more rows.
    few = cpu_linear.pack_int8(weight, bias)
    return lambda x: few(x) if x.numel() <= INT8_ROWS * size else dense(x)


def _by_rows(product: Callable[[Tensor], Tensor]) -> LinearKernel:
    """Make a product of any shape of one that takes rows [T, in_features]."""

    def shaped(x: Tensor) -> Tensor:
        y = product(x.reshape(-1, x.shape[-1]))
        return y.view(*x.shape[:-1], y.shape[1])

    return shaped


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
        return cpu_linear.pack(weight, bias, deterministic=deterministic)
    if deterministic and uses_triton(weight.device):
        from engine.kernels.linear.deterministic_triton import multiply

        return _by_rows(partial(multiply, weight=weight.contiguous(), bias=bias))
    dense = _library_product(weight, bias)
    return _by_rows(in_tiles(dense)) if deterministic else dense


def in_tiles(product: LinearKernel) -> LinearKernel:
    """Cut rows [T, in_features] into tiles of TILE_ROWS, the last filled up with zeros."""

    def tiled(x: Tensor) -> Tensor:
        num_tiles = max(1, -(-len(x) // TILE_ROWS))
        padded = x.new_zeros(num_tiles * TILE_ROWS, x.shape[1])
        padded[: len(x)] = x
        return torch.cat([product(tile) for tile in padded.split(TILE_ROWS)])[: len(x)]

    return tiled


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
