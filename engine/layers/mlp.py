"""The gated feed-forward layer, SwiGLU (arXiv:2002.05202)."""

from __future__ import annotations

from torch import Tensor

from engine.kernels.pointwise.swiglu import swiglu
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.layers.parallel import ParallelGroup, share
from engine.layers.weight_source import WeightSource


class GatedMLP:
    """[T, hidden] -> [T, hidden]: down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(
        self,
        source: WeightSource,
        name: str,
        hidden: int,
        intermediate: int,
        *,
        bias: bool,
        group: ParallelGroup,
    ) -> None:
        share(intermediate, group, "intermediate_size")
        self._deterministic = source.deterministic
        parts = ((f"{name}.gate_proj", intermediate), (f"{name}.up_proj", intermediate))
        self._gate_up = ColumnParallelLinear(source, parts, hidden, bias=bias, group=group)
        self._down = RowParallelLinear(
            source, f"{name}.down_proj", intermediate, hidden, bias=bias, group=group
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(swiglu(self._gate_up(x), deterministic=self._deterministic))
