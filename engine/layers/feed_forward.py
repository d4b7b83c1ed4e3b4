"""The feed-forward layer: one gated network (SwiGLU, arXiv:2002.05202), or a mixture of experts in
its place, each expert cut over ranks like one.

Knows checkpoint names only as they are handed in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.linear.dispatch import pack_linear
from engine.kernels.linear.weights import DenseWeight, LinearWeight, dequantise, join
from engine.kernels.mixture.moe import pack_experts, route
from engine.kernels.pointwise.swiglu import swiglu
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.layers.parallel import ParallelGroup, own_shard, share
from engine.layers.weight_source import WeightSource

FUSED = "mlp.experts.gate_up_proj"
"""Gate and up of all experts in one tensor, as transformers 5 holds, and may store, any family."""


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


class ExpertNames(NamedTuple):
    """The names of the tensors inside a layer, as the family publishes them."""

    block: str
    gate: str
    up: str
    down: str


class MixtureOfExperts:
    """[T, hidden] -> [T, hidden]. Every rank routes alike and has its share of every expert."""

    def __init__(
        self,
        source: WeightSource,
        layer: str,
        names: ExpertNames,
        *,
        hidden: int,
        intermediate: int,
        num_experts: int,
        experts_per_token: int,
        normalise: bool,
        group: ParallelGroup,
    ) -> None:
        self._group = group
        self._experts_per_token = experts_per_token
        self._normalise = normalise
        self._hidden, self._intermediate, self._num_experts = hidden, intermediate, num_experts
        share(intermediate, group, "the experts' intermediate size")
        fused = source.has(f"{layer}.{FUSED}")
        block = f"{layer}.mlp" if fused else f"{layer}.{names.block}"
        gate = source.take(f"{block}.gate.weight", (num_experts, hidden))
        self._router = pack_linear(gate, None, deterministic=source.deterministic)
        pairs = self._fused(source, layer) if fused else self._single(source, block, names)
        gate_up, down = zip(*pairs, strict=True)
        self._experts = pack_experts(gate_up, down, deterministic=source.deterministic)

    def _single(
        self, source: WeightSource, block: str, names: ExpertNames
    ) -> Iterator[tuple[LinearWeight, LinearWeight]]:
        """Gate with up, and down, of one expert after the other."""
        hidden, intermediate = self._hidden, self._intermediate
        outputs, inputs = own_shard(self._group), own_shard(self._group, dim=1)
        for i in range(self._num_experts):
            name = f"{block}.experts.{i}"
            gate = source.linear(f"{name}.{names.gate}", intermediate, hidden, outputs)
            up = source.linear(f"{name}.{names.up}", intermediate, hidden, outputs)
            down = source.linear(f"{name}.{names.down}", hidden, intermediate, inputs)
            joined = join((gate, up))
            if joined is None:
                joined = DenseWeight(torch.cat((dequantise(gate), dequantise(up))))
            yield joined, down

    def _fused(
        self, source: WeightSource, layer: str
    ) -> Iterator[tuple[LinearWeight, LinearWeight]]:
        experts, hidden, intermediate = self._num_experts, self._hidden, self._intermediate
        own = intermediate // self._group.size
        first = self._group.rank * own
        gate_up = source.take(f"{layer}.{FUSED}", (experts, 2 * intermediate, hidden))
        pairs = gate_up.view(experts, 2, intermediate, hidden)[:, :, first : first + own]
        name, shard = f"{layer}.mlp.experts.down_proj", own_shard(self._group, dim=2)
        down = source.take(name, (experts, hidden, intermediate), shard)
        for i in range(experts):
            yield (
                source.dense(pairs[i].reshape(2 * own, hidden)),
                source.dense(down[i].contiguous()),
            )

    def __call__(self, x: Tensor) -> Tensor:
        weights, experts = route(
            self._router(x), self._experts_per_token, normalise=self._normalise
        )
        return self._group.all_reduce(self._experts(x, weights, experts))
