"""Products with quantised weights, mixtures of experts and adapters: against float64 of what is
stored, on the sizes of served models.

Knows no checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench.gpu.findings import LIMITS, Finding, poisoned, relative
from bench.gpu.place import Place
from engine.kernels.linear.dispatch import pack_linear
from engine.kernels.linear.fp8 import quantise_tokens_reference
from engine.kernels.linear.weights import (
    DenseWeight,
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    LinearWeight,
    dequantise,
    quantise_fp8,
    quantise_int8,
)
from engine.kernels.mixture import moe
from engine.kernels.mixture.lora import add_lora, stack_adapters
from engine.kernels.mixture.types import NOBODY, LoraRows

Make = Callable[[Place, int, int, int], LinearWeight]
"""(place, outputs, inputs, seed)"""
MOE_FACTOR = 1.5
"""The rounding between an expert's two products raises the limit of one by this factor."""


def _dense(place: Place, outputs: int, inputs: int, seed: int) -> Tensor:
    return place.randn(outputs, inputs, seed=seed) / inputs**0.5


def dense(place: Place, outputs: int, inputs: int, seed: int) -> LinearWeight:
    return DenseWeight(_dense(place, outputs, inputs, seed).to(place.half))


def fp8_channel(place: Place, outputs: int, inputs: int, seed: int) -> LinearWeight:
    return replace(quantise_fp8(_dense(place, outputs, inputs, seed)), dtype=place.half)


def fp8_block(place: Place, outputs: int, inputs: int, seed: int) -> LinearWeight:
    """Scales of [128, 128], as DeepSeek-V3 and Qwen3 are published."""
    block = place.pick((128, 128), (32, 32))
    size = (-(-outputs // block[0]), -(-inputs // block[1]))
    scale = torch.rand(size, generator=place.generator(seed), device=place.device) / 50 + 0.001
    values = (_dense(place, outputs, inputs, seed) * 100).clamp(-448, 448)
    return Fp8Weight(values.to(torch.float8_e4m3fn), scale, block, place.half)


def int8(place: Place, outputs: int, inputs: int, seed: int) -> LinearWeight:
    return replace(quantise_int8(_dense(place, outputs, inputs, seed)), dtype=place.half)


def _grouped(bits: int, *, ordered: bool) -> Make:
    def make(place: Place, outputs: int, inputs: int, seed: int) -> LinearWeight:
        group = place.pick(128, 32)
        draw = place.generator(seed)
        options: dict[str, Any] = {"generator": draw, "device": place.device}
        scales = torch.rand(inputs // group, outputs, **options).half()
        return GroupedWeight(
            codes=torch.randint(2**bits, (outputs, inputs), **options).to(torch.uint8),
            scales=scales / (2**bits * inputs**0.5),
            zeros=torch.randint(1, 2**bits, scales.shape, **options).to(torch.int16),
            bits=bits,
            group_size=group,
            order=torch.randperm(inputs, **options) if ordered else None,
            dtype=place.half,
        )

    return make


FORMS: dict[str, Make] = {
    "fp8, a scale an output": fp8_channel,
    "fp8 blocks": fp8_block,
    "int8": int8,
    "int4": _grouped(4, ordered=False),
    "int4 in an order": _grouped(4, ordered=True),
    "8-bit groups": _grouped(8, ordered=False),
}


def products(form: str) -> Callable[[Place], Iterator[Finding]]:
    make = FORMS[form]

    def check(place: Place) -> Iterator[Finding]:
        sizes = place.pick(((6144, 4096), (4096, 14_336), (1040, 2048)), ((48, 96),))
        for outputs, inputs in sizes:
            weight = make(place, outputs, inputs, outputs)
            bias = place.randn(outputs, seed=1, dtype=place.half) if outputs != 4096 else None
            kernel = pack_linear(weight, bias)
            for tokens in place.pick((1, 16, 61, 300), (1, 17)):
                # Rows of a wider tensor: their stride is not their length.
                x = place.randn(tokens, inputs + 16, seed=tokens, dtype=place.half)[:, :inputs]
                with poisoned():
                    found = kernel(x)
                error = relative(found, _exact(weight, x, bias))
                yield Finding(f"{outputs} x {inputs}, {tokens}", error, LIMITS[place.half])

    return check


def _exact(weight: LinearWeight, x: Tensor, bias: Tensor | None) -> Tensor:
    wide = x.double()
    if isinstance(weight, Fp8Weight):
        group = weight.block[1]
        values, scale = quantise_tokens_reference(x, group)
        spread = scale.repeat_interleave(group, 1)[:, : x.shape[1]]
        wide = values.double() * spread.double()
    y = wide @ _plain(weight).t()
    return y if bias is None else y + bias.double()


def _plain(weight: LinearWeight) -> Tensor:
    if isinstance(weight, DenseWeight):
        return weight.weight.double()
    assert isinstance(weight, Fp8Weight | Int8Weight | GroupedWeight)
    return dequantise(replace(weight, dtype=torch.float64))


EXPERT_FORMS: dict[str, Make] = {
    "bf16": dense,
    "int8": int8,
    "fp8 channel": fp8_channel,
    "fp8 blocks": fp8_block,
    "int4": _grouped(4, ordered=False),
}


def experts(place: Place) -> Iterator[Finding]:
    """Eight wide experts of two as Mixtral's, and many narrow ones of eight as Qwen3's."""
    shapes = [("Mixtral", 2048, 3584, 8, 2), ("Qwen3-MoE", 2048, 768, 128, 8)]
    for name, hidden, inner, count, top_k in place.pick(shapes, [("few", 64, 96, 5, 2)]):
        for form, make in EXPERT_FORMS.items():
            gate_up = [make(place, 2 * inner, hidden, i) for i in range(count)]
            down = [make(place, hidden, inner, 1000 + i) for i in range(count)]
            kernel = moe.pack_experts(gate_up, down)
            for tokens in place.pick((1, 19, 300), (7,)):
                x = place.randn(tokens, hidden, seed=tokens, dtype=place.half)
                logits = place.randn(tokens, count, seed=tokens + 1)
                shares, chosen = moe.route(logits, top_k, normalise=True)
                wanted, ids = moe.route_reference(logits.double(), top_k, normalise=True)
                case = f"{name} {form}, {tokens}"
                yield Finding(f"{case}: experts", float((chosen != ids).sum()), 0.0)
                yield Finding(f"{case}: shares", relative(shares, wanted.double()), 1e-5)
                with poisoned():
                    found = kernel(x, shares, chosen)
                exact = _experts_exact(x, shares, chosen, gate_up, down)
                limit = MOE_FACTOR * LIMITS[place.half]
                yield Finding(case, relative(found, exact), limit)


def _experts_exact(
    x: Tensor,
    shares: Tensor,
    chosen: Tensor,
    gate_up: list[LinearWeight],
    down: list[LinearWeight],
) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in chosen.unique().tolist():
        token, place_of = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x[token].double() @ _plain(gate_up[expert]).t()).chunk(2, dim=-1)
        y = (gate * torch.sigmoid(gate) * up) @ _plain(down[expert]).t()
        out.index_add_(0, token, y * shares[token, place_of].double()[:, None])
    return out


def adapters(place: Place) -> Iterator[Finding]:
    """Ranks of every size, mixed over the rows of a step; queries, keys and values side by side."""
    inputs, sizes = place.pick((4096, (4096, 1024, 1024)), (96, (48, 24)))
    ranks = place.pick((8, 16, 64, 33), (4, 20))
    pairs: list[list[tuple[Tensor, Tensor] | None]] = [
        [
            (
                _dense(place, rank, inputs, seed=10 * slot + part).to(place.half),
                _dense(place, size, rank, seed=10 * slot + part + 5).to(place.half),
            )
            for part, size in enumerate(sizes)
        ]
        for slot, rank in enumerate(ranks)
    ]
    pairs[-1][0] = None
    example = torch.empty(0, dtype=place.half, device=place.device)
    stack = stack_adapters(pairs, sizes, example)
    steps = {
        "one": [(0, 1)],
        "decodes": [(i % len(ranks), 1) for i in range(place.pick(64, 5))],
        "mixed": [(NOBODY, 3), (1, place.pick(200, 20)), (0, 1), (1, 17), (len(ranks) - 1, 5)],
    }
    for case, slots in steps.items():
        count = sum(size for _, size in slots)
        x = place.randn(count, inputs, seed=count, dtype=place.half)
        y = place.randn(count, sum(sizes), seed=count + 1, dtype=place.half)
        exact, row = y.double(), 0
        for slot, size in slots:
            start = 0
            for part, columns in enumerate(sizes):
                pair = None if slot == NOBODY else pairs[slot][part]
                if pair is not None:
                    a, b = (matrix.double() for matrix in pair)
                    delta = x[row : row + size].double() @ a.t() @ b.t()
                    exact[row : row + size, start : start + columns] += delta
                start += columns
            row += size
        rows = LoraRows(place.device, len(ranks))
        rows.assign(slots)
        with poisoned():
            add_lora(y, x, stack, rows)
        yield Finding(case, relative(y, exact), LIMITS[place.half])


CHECKS = {
    **{f"linear: {form}": products(form) for form in FORMS},
    "mixtures of experts": experts,
    "adapters": adapters,
}
