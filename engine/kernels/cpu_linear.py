"""Dense products on a processor: the weight in panels, and the call.

Above: `linear.py`. Below: `cpu/linear.py`. Measured on one core with AVX-512 BF16, against
oneDNN's reordered weights: 1.1-1.2 times as fast for 1 to 8 rows of bfloat16 (1.1-1.4 of float32),
alike for 16 to 64, a tenth slower for 512.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.kernels.cpu_backend import DTYPES, empty, half, kernel, start, uses_cpu_kernels

PANEL = 32


def cpu_multiplies(weight: Tensor) -> bool:
    """Whether the kernel serves this weight [out, in]: a word holds two inputs of bfloat16."""
    return (
        weight.dtype in DTYPES
        and weight.shape[1] % (1 + half(weight.dtype)) == 0
        and uses_cpu_kernels(weight.device)
    )


def pack(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """`weight` and `bias` are copied."""
    num_outputs, num_inputs = weight.shape
    panels = to_panels(weight)
    dtype, bits, size = weight.dtype, half(weight.dtype), weight.itemsize
    wide = None
    if bias is not None:
        wide = torch.zeros(len(panels) * PANEL)
        wide[:num_outputs] = bias
    linear, steps = kernel("linear", "linear"), num_inputs >> bits

    def product(x: Tensor) -> Tensor:
        rows = x.reshape(-1, num_inputs)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        assert rows.dtype == dtype, f"{rows.dtype} against weights in {dtype}"
        y = empty((len(rows), num_outputs), dtype)
        start(
            linear,
            (
                0,
                rows.data_ptr(),
                rows.stride(0) * size,
                panels.data_ptr(),
                steps,
                y.data_ptr(),
                num_outputs * size,
                0 if wide is None else wide.data_ptr(),
                len(rows),
                num_outputs,
                len(panels),
                bits,
            ),
            torch.get_num_threads(),
        )
        return y.view(*x.shape[:-1], num_outputs)

    return product


def to_panels(weight: Tensor) -> Tensor:
    """[N, K] -> [ceil(N / 32), K / P, 32, P], P inputs a word; rows that are not there are zero."""
    num_outputs, num_inputs = weight.shape
    each = 1 + half(weight.dtype)
    count = -(-num_outputs // PANEL)
    panels = weight.new_empty(count, num_inputs // each, PANEL, each)
    whole = num_outputs // PANEL
    split = weight[: whole * PANEL].view(whole, PANEL, num_inputs // each, each)
    panels[:whole] = split.transpose(1, 2)
    if whole < count:
        rest = weight[whole * PANEL :].view(-1, num_inputs // each, each)
        panels[whole].zero_()
        panels[whole, :, : len(rest)] = rest.transpose(0, 1)
    return panels
