"""Products on a processor: the weight in panels, and the call.

Whether our own tiles or oneDNN's microkernel multiply the panels of a bfloat16 weight is measured
for each shape and class of rows when an engine starts (`choice/products.py`). On one core with
AVX-512 BF16 our tiles are as fast or faster for every number of rows (1.0 to 1.5 times); where
there is AMX the library has instructions that ours do not use. In int8 a row takes a third to two
thirds of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from engine.kernels.choice.microkernel import Microkernel
from engine.kernels.choice.products import CLASS_OF, LinearShape, uses_library
from engine.kernels.cpu.backend import DTYPES, empty, half, kernel, start, uses_cpu_kernels
from engine.kernels.linear.weights import Int8Weight

PANEL = 32


def cpu_multiplies(dtype: torch.dtype, num_inputs: int, device: torch.device) -> bool:
    """Whether the kernels serve activations of this dtype: a word holds two of bfloat16."""
    return dtype in DTYPES and num_inputs % (1 + half(dtype)) == 0 and uses_cpu_kernels(device)


def pack(
    weight: Tensor, bias: Tensor | None, *, deterministic: bool = False
) -> Callable[[Tensor], Tensor]:
    """`weight` [out, in] and `bias` are copied. deterministic: our own tiles multiply, always."""
    panels = to_panels(weight, 1 + half(weight.dtype))
    product = PanelProduct(panels, weight.shape, weight.dtype, bias=bias)
    found = None
    if weight.dtype == torch.bfloat16 and not deterministic:
        found = uses_library(LinearShape(*weight.shape))
    if found is None:
        return product.by_own_tiles
    uses, library = found
    by_own_tiles, by_library = product.by_own_tiles, partial(product.by_library, library)
    last, num_inputs = len(CLASS_OF), weight.shape[1]

    def by_measured(x: Tensor) -> Tensor:
        rows = x.numel() // num_inputs
        return by_library(x) if uses[CLASS_OF[rows] if rows < last else -1] else by_own_tiles(x)

    return by_measured


def pack_int8(weight: Int8Weight, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """For a few rows at a time. Everything is copied."""
    panels = to_panels(weight.values, 1)
    product = PanelProduct(panels, weight.values.shape, weight.dtype, bias=bias, scale=weight.scale)
    return product.of_int8


class PanelProduct:
    """Calls kernels on one weight in panels, with x [..., in] in `dtype`."""

    def __init__(
        self,
        panels: Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        bias: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> None:
        """shape: [out, in] of the weight."""
        self._panels = panels
        self._num_outputs, self._num_inputs = shape
        self._dtype = dtype
        self._bias, self._scale = (_widened(each, len(panels)) for each in (bias, scale))

    def by_own_tiles(self, x: Tensor) -> Tensor:
        return self._run(kernel("linear", "linear"), x, ())

    def by_library(self, library: Microkernel, x: Tensor) -> Tensor:
        return self._run(kernel("library_linear", "library_linear"), x, library)

    def of_int8(self, x: Tensor) -> Tensor:
        assert self._scale is not None
        return self._run(kernel("int8_linear", "int8_linear"), x, (self._scale.data_ptr(),))

    def _run(self, run: int, x: Tensor, more: tuple[int, ...]) -> Tensor:
        """more: the kernel's arguments behind those that all have."""
        dtype, num_inputs, num_outputs = self._dtype, self._num_inputs, self._num_outputs
        rows = x.reshape(-1, num_inputs)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        assert rows.dtype == dtype, f"{rows.dtype} against weights for {dtype}"
        num_rows, bits, size = rows.shape[0], half(dtype), dtype.itemsize
        y = empty((num_rows, num_outputs), dtype)
        start(
            run,
            (
                0,
                rows.data_ptr(),
                rows.stride(0) * size,
                self._panels.data_ptr(),
                num_inputs >> bits,
                y.data_ptr(),
                num_outputs * size,
                0 if self._bias is None else self._bias.data_ptr(),
                num_rows,
                num_outputs,
                self._panels.shape[0],
                bits,
                *more,
            ),
            torch.get_num_threads(),
        )
        return y.view(*x.shape[:-1], num_outputs)


def _widened(vector: Tensor | None, num_panels: int) -> Tensor | None:
    """float32 [num_panels * 32], zero behind the end."""
    if vector is None:
        return None
    wide = torch.zeros(num_panels * PANEL)
    wide[: len(vector)] = vector
    return wide


def to_panels(weight: Tensor, each: int) -> Tensor:
    """[N, K] -> [ceil(N / 32), K / each, 32, each]; rows that are not there are zero."""
    num_outputs, num_inputs = weight.shape
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
