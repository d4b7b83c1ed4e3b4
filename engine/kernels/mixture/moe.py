"""A mixture of experts (arXiv:2101.03961, top-k as in arXiv:2401.04088): which experts a token goes
to, and the products with them.

    y[t] = sum over the k experts e of t of r[t, e] * down_e(silu(gate_e(x[t])) * up_e(x[t]))

Knows no names, no sharding.

On a CPU tokens are sorted by expert, and each expert that has any multiplies them once, with the
packing of `linear.py`. On a GPU one grouped product serves all experts; quantised experts stay
quantised and are widened in registers, whatever their form (activations stay as they are, float8
weights included: a decode waits for bytes, not for arithmetic). Experts with an order of inputs of
their own (GPTQ's desc_act) are made dense there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.kernels.backend import uses_triton
from engine.kernels.linear.dispatch import pack_linear
from engine.kernels.linear.fp8 import reads_fp8
from engine.kernels.linear.int4 import MIN_SPAN, pack_codes, span_of
from engine.kernels.linear.weights import (
    DenseWeight,
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    LinearWeight,
    dequantise,
)
from engine.kernels.mixture.types import Stack, WeightKind
from engine.kernels.pointwise.swiglu import swiglu

ExpertsKernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x [T, K], weights float32 [T, k], experts int32 [T, k]) -> [T, K]"""


def route(logits: Tensor, top_k: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """The k most likely experts of each token: probabilities float32 [T, k], ids int32 [T, k], most
    likely first. normalise: the probabilities of a token sum to 1."""
    if uses_triton(logits.device):
        from engine.kernels.mixture import moe_triton

        return moe_triton.route(logits, top_k, normalise=normalise)
    return route_reference(logits, top_k, normalise=normalise)


def route_reference(logits: Tensor, top_k: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    weights, experts = torch.softmax(logits.float(), dim=-1).topk(top_k, dim=-1)
    if normalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts.int()


def pack_experts(
    gate_up: Sequence[LinearWeight], down: Sequence[LinearWeight], *, deterministic: bool = False
) -> ExpertsKernel:
    """gate_up: of each expert, the rows of gate before those of up. deterministic: a token's bits
    depend on no other token."""
    example = _numbers(gate_up[0])
    if not uses_triton(example.device):
        return _pack_sorted(gate_up, down, deterministic)
    from engine.kernels.mixture import moe_triton

    first, second = stack(gate_up), stack(down)
    return lambda x, weights, experts: moe_triton.run(
        x, weights, experts, first, second, deterministic=deterministic
    )


def _numbers(weight: LinearWeight) -> Tensor:
    """The stored numbers of a weight, whatever they are."""
    match weight:
        case DenseWeight():
            return weight.weight
        case GroupedWeight():
            return weight.codes
    return weight.values


def _pack_sorted(
    gate_up: Sequence[LinearWeight], down: Sequence[LinearWeight], deterministic: bool = False
) -> ExpertsKernel:
    """A token's experts are added up in the order of their numbers."""
    firsts = [pack_linear(weight, None, deterministic=deterministic) for weight in gate_up]
    seconds = [pack_linear(weight, None, deterministic=deterministic) for weight in down]
    num_experts = len(firsts)

    def run(x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        flat = experts.flatten().long()
        order = torch.argsort(flat, stable=True)
        rows = order // experts.shape[1]
        shares = weights.flatten()[order].to(x.dtype)
        stop = 0
        for expert, count in enumerate(torch.bincount(flat, minlength=num_experts).tolist()):
            if count == 0:
                continue
            start, stop = stop, stop + count
            own = rows[start:stop]
            gated = swiglu(firsts[expert](x.index_select(0, own)), deterministic=deterministic)
            y = seconds[expert](gated)
            out.index_add_(0, own, y.mul_(shares[start:stop, None]))
        return out

    return run


def stack(weights: Sequence[LinearWeight]) -> Stack:
    """All experts side by side in the form that they share; dense where they share none that the
    grouped product reads."""
    first = weights[0]
    num_inputs = _numbers(first).shape[1]
    if all(isinstance(weight, Int8Weight) for weight in weights):
        return _stack_scaled(weights, WeightKind.CHANNEL, num_inputs)
    if isinstance(first, Fp8Weight) and reads_fp8(first.values.device):
        columns = first.block[1]
        power = columns >= 16 and columns & (columns - 1) == 0
        if all(isinstance(w, Fp8Weight) and w.block == first.block for w in weights):
            if first.block == (1, num_inputs):
                return _stack_scaled(weights, WeightKind.CHANNEL, num_inputs)
            if power:
                return _stack_blocks(weights, first.block, num_inputs)
    if isinstance(first, GroupedWeight):
        every = [weight for weight in weights if isinstance(weight, GroupedWeight)]
        grouped = [weight for weight in every if _like(weight, first)]
        if len(grouped) == len(weights) and span_of(first.group_size) >= MIN_SPAN:
            return _stack_grouped(grouped, num_inputs)
    dense = torch.stack([dequantise(weight) for weight in weights])
    return Stack(WeightKind.DENSE, dense, None, None, num_inputs)


def _like(weight: GroupedWeight, first: GroupedWeight) -> bool:
    form = (weight.bits, weight.group_size)
    return weight.order is None and form == (first.bits, first.group_size)


def _stack_scaled(weights: Sequence[LinearWeight], kind: WeightKind, num_inputs: int) -> Stack:
    scaled = [weight for weight in weights if isinstance(weight, Int8Weight | Fp8Weight)]
    values = _stack_bytes([weight.values for weight in scaled])
    scales = torch.stack([weight.scale.flatten() for weight in scaled])
    return Stack(kind, values, scales, None, num_inputs)


def _stack_blocks(
    weights: Sequence[LinearWeight], block: tuple[int, int], num_inputs: int
) -> Stack:
    scaled = [weight for weight in weights if isinstance(weight, Fp8Weight)]
    values = _stack_bytes([weight.values for weight in scaled])
    scales = torch.stack([weight.scale for weight in scaled])
    return Stack(
        WeightKind.BLOCK, values, scales, None, num_inputs, rows=block[0], columns=block[1]
    )


def _stack_grouped(weights: Sequence[GroupedWeight], num_inputs: int) -> Stack:
    first = weights[0]
    return Stack(
        WeightKind.GROUPED,
        torch.stack([pack_codes(weight) for weight in weights]),
        torch.stack([weight.scales for weight in weights]),
        torch.stack([weight.zeros for weight in weights]),
        num_inputs,
        columns=first.group_size,
        bits=first.bits,
        span=span_of(first.group_size),
    )


def _stack_bytes(tensors: list[Tensor]) -> Tensor:
    """Torch stacks no float8: its bytes are stacked in their place."""
    return torch.stack([tensor.view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)
