"""y = x W^T + b with weights and activations in float8_e4m3fn.

Knows no checkpoint.

Activations are quantised when they arrive: one scale for each token where the weight has one for
each output (then cuBLAS multiplies, by `torch._scaled_mm`), and one for each token and 128 inputs
where the weight has a scale for each block (DeepSeek-V3, arXiv:2412.19437), multiplied by a Triton
kernel. Static activation scales of a checkpoint are not used: those of the token at hand are never
worse. Where no kernel reads float8, `linear_weights.dequantise` makes the weight dense at load.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.kernels.backend import uses_triton
from engine.kernels.linear.weights import FP8_MAX, Fp8Weight

MIN_CAPABILITY = (8, 9)
"""The first whose tensor cores multiply e4m3."""
CUBLAS_MULTIPLE = 16
"""`torch._scaled_mm` wants both sizes of the weight to be multiples of it."""
MIN_SCALE = 1e-12
"""The scale of a group of zeros."""


def keeps(weight: Fp8Weight) -> bool:
    """Whether a kernel multiplies this weight as it is."""
    columns = weight.block[1]
    if not reads_fp8(weight.values.device):
        return False
    return weight.block[0] == 1 or (columns >= 32 and columns & (columns - 1) == 0)


def reads_fp8(device: torch.device) -> bool:
    """Whether kernels take float8 on this device."""
    if not uses_triton(device):
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def pack(
    weight: Fp8Weight, bias: Tensor | None, *, deterministic: bool = False
) -> Callable[[Tensor], Tensor]:
    """Return the product of rows [T, K]."""
    num_outputs, num_inputs = weight.values.shape
    whole = num_outputs % CUBLAS_MULTIPLE == 0 and num_inputs % CUBLAS_MULTIPLE == 0
    # cuBLAS scales rows for bfloat16 results only, and picks a kernel by their number.
    fits = weight.values.device.type == "cuda" and weight.dtype == torch.bfloat16 and whole
    if weight.block == (1, num_inputs) and fits and not deterministic:
        return _pack_cublas(weight, bias)
    from engine.kernels.linear import fp8_triton as fp8_linear_triton

    def product(x: Tensor) -> Tensor:
        values, scale = quantise_tokens(x, weight.block[1])
        return fp8_linear_triton.multiply(
            values, scale, weight, bias, x.dtype, deterministic=deterministic
        )

    return product


def _pack_cublas(weight: Fp8Weight, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    num_outputs, num_inputs = weight.values.shape
    columns, scale_b = weight.values.t(), weight.scale.view(1, num_outputs)

    def product(x: Tensor) -> Tensor:
        values, scale_a = quantise_tokens(x, num_inputs)
        return torch._scaled_mm(
            values, columns, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=x.dtype
        )

    return product


def quantise_tokens(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """x [T, K] as float8_e4m3fn [T, K] and float32 scales [T, ceil(K / group_size)]."""
    if uses_triton(x.device):
        from engine.kernels.linear import fp8_triton as fp8_linear_triton

        return fp8_linear_triton.quantise(x, group_size)
    return quantise_tokens_reference(x, group_size)


def quantise_tokens_reference(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    num_groups = -(-x.shape[1] // group_size)
    padded = torch.nn.functional.pad(x.float(), (0, num_groups * group_size - x.shape[1]))
    groups = padded.view(x.shape[0], num_groups, group_size)
    scale = (groups.abs().amax(dim=2) / FP8_MAX).clamp(min=MIN_SCALE)
    values = (groups / scale[:, :, None]).clamp(-FP8_MAX, FP8_MAX).flatten(1)
    return values[:, : x.shape[1]].to(torch.float8_e4m3fn).contiguous(), scale
