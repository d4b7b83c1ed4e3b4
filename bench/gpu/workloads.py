"""The served shapes that launch parameters are tuned on, and the values worth trying.

Knows no key of a tuned table: the wrappers ask for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bench.gpu.checks import check_linear
from bench.gpu.paged_steps import PagedStep, shape_of
from bench.gpu.place import Place
from engine.kernels.linear.dispatch import pack_linear
from engine.kernels.mixture import moe
from engine.kernels.mixture.lora import add_lora, stack_adapters
from engine.kernels.mixture.types import LoraRows
from engine.kernels.pointwise.rms_norm import add_rms_norm
from engine.kernels.pointwise.swiglu import swiglu

Call = Callable[[], Tensor]

TILES = {
    "BLOCK_N": (16, 32, 64, 128, 256),
    "BLOCK_M": (16, 32, 64, 128),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5, 6),
}
SPACE: dict[str, dict[str, tuple[int, ...]]] = {
    "decode_attention": {
        "block_n": (16, 32, 64, 128),
        "num_stages": (2, 3, 4, 5, 6),
        "num_warps": (2, 4, 8),
        "waves": (1, 2, 3, 4),
        "long_split": (1024, 2048, 4096, 8192),
    },
    "prefill_attention": {
        "block_m": (64, 128),
        "block_n": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4),
    },
    "fp8_linear": TILES,
    "int8_linear": TILES | {"BLOCK_K": (64, 128, 256)},
    "int4_linear": TILES,
    "moe": TILES,
    "lora": {
        "SHRINK_N": (16, 32, 64),
        "SHRINK_K": (64, 128, 256),
        "EXPAND_N": (32, 64, 128, 256),
    },
    "rms_norm": {"num_warps": (1, 2, 4, 8, 16)},
    "swiglu": {"BLOCK": (512, 1024, 2048, 4096), "num_warps": (2, 4, 8)},
}
"""Operation -> parameter -> values, tried in this order, each with the best of those before."""


class Workload(NamedTuple):
    """Calls of one operation whose time counts alike. `prepare` is called anew for every choice of
    parameters: a plan is made with them."""

    name: str
    op: str
    prepare: Callable[[], list[Call]]


def workloads(place: Place) -> list[Workload]:
    """The most served ones first: time may run out."""
    found = [
        Workload("decode d128", "decode_attention", lambda: _decodes(place, 128, None)),
        Workload("prefill d128", "prefill_attention", lambda: _prefills(place, 128, (4096, 1024))),
        Workload(
            "fp8 blocks, 16 tokens", "fp8_linear", lambda: _linear(place, "fp8 blocks", (1, 16))
        ),
        Workload("int4, 16 tokens", "int4_linear", lambda: _linear(place, "int4", (1, 16))),
        Workload("int8, 16 tokens", "int8_linear", lambda: _linear(place, "int8", (1, 16))),
        Workload("experts, 32 tokens", "moe", lambda: _experts(place, 32)),
        Workload("prefill d64", "prefill_attention", lambda: _prefills(place, 64, (2048,))),
        Workload("decode d64", "decode_attention", lambda: _decodes(place, 64, None)),
    ]
    if place.tiny:
        return found[:3]
    for tokens in (64, 512):
        for form, op in (
            ("fp8 blocks", "fp8_linear"),
            ("int4", "int4_linear"),
            ("int8", "int8_linear"),
        ):
            found.append(
                Workload(
                    f"{form}, {tokens} tokens",
                    op,
                    lambda form=form, tokens=tokens: _linear(place, form, (tokens,)),  # type: ignore
                )
            )
    return [
        *found,
        Workload("experts, 2048 tokens", "moe", lambda: _experts(place, 2048)),
        Workload("short prefill d128", "prefill_attention", lambda: _prefills(place, 128, (16,))),
        Workload("lora, rank 16", "lora", lambda: _lora(place, 16)),
        Workload("lora, rank 64", "lora", lambda: _lora(place, 64)),
        Workload("norm 4096", "rms_norm", lambda: _norms(place)),
        Workload("gate 14336", "swiglu", lambda: _gates(place)),
    ]


def _attend(place: Place, step: PagedStep) -> Call:
    from engine.kernels.attention.triton import TritonAttentionPlan
    from engine.kernels.attention.types import to_device

    plan = TritonAttentionPlan(to_device(step.metadata, step.shape), step.shape, None)
    return lambda: plan.attend(step.q, step.cache)


def _decodes(place: Place, head_dim: int, cache: torch.dtype | None) -> list[Call]:
    """Alone and long, a usual batch, a large one."""
    heads = place.pick({128: (32, 8), 64: (9, 3)}[head_dim], (4, 2))
    shape = shape_of(heads, place.pick(head_dim, 64), place.device, place.half, cache)
    steps = place.pick(((1, 8192), (32, 2048), (256, 1024)), ((1, 64), (2, 32)))
    return [_attend(place, PagedStep(place, shape, [(1, n)] * seqs)) for seqs, n in steps]


def _prefills(place: Place, head_dim: int, lengths: tuple[int, ...]) -> list[Call]:
    heads = place.pick({128: (32, 8), 64: (9, 3)}[head_dim], (4, 2))
    shape = shape_of(heads, place.pick(head_dim, 64), place.device, place.half)
    calls = []
    for length in place.pick(lengths, (24,)):
        seqs = [(length, length + (1024 if length < 64 else 0))] * max(1, 8192 // length // 4)
        calls.append(_attend(place, PagedStep(place, shape, place.pick(seqs, seqs[:1]))))
    return calls


def _linear(place: Place, form: str, tokens: tuple[int, ...]) -> list[Call]:
    """The two largest products of a layer of 8 B parameters."""
    calls: list[Call] = []
    for outputs, inputs in place.pick(((28_672, 4096), (4096, 14_336)), ((48, 96),)):
        kernel = pack_linear(check_linear.FORMS[form](place, outputs, inputs, 1), None)
        for count in tokens:
            x = place.randn(count, inputs, seed=count, dtype=place.half)
            calls.append(lambda kernel=kernel, x=x: kernel(x))  # type: ignore[misc]
    return calls


def _experts(place: Place, tokens: int) -> list[Call]:
    """Qwen3-MoE's, dense and in blocks of float8."""
    hidden, inner, count, top_k = place.pick((2048, 768, 128, 8), (64, 96, 4, 2))
    x = place.randn(tokens, hidden, seed=1, dtype=place.half)
    shares, chosen = moe.route(place.randn(tokens, count, seed=2), top_k, normalise=True)
    kernel = moe.pack_experts(
        [check_linear.dense(place, 2 * inner, hidden, i) for i in range(count)],
        [check_linear.dense(place, hidden, inner, i) for i in range(count)],
    )
    return [lambda: kernel(x, shares, chosen)]


def _lora(place: Place, rank: int) -> list[Call]:
    sizes, inputs, slots = (4096, 1024, 1024), 4096, 4
    pairs = [
        [
            (
                place.randn(rank, inputs, seed=slot, dtype=place.half) / inputs**0.5,
                place.randn(size, rank, seed=slot + 9, dtype=place.half),
            )
            for size in sizes
        ]
        for slot in range(slots)
    ]
    example = torch.empty(0, dtype=place.half, device=place.device)
    stack = stack_adapters(pairs, sizes, example)
    calls: list[Call] = []
    for assigned in ([(i % slots, 1) for i in range(32)], [(i, 256) for i in range(slots)]):
        rows = LoraRows(place.device, slots)
        rows.assign(assigned)
        count = sum(size for _, size in assigned)
        x = place.randn(count, inputs, seed=3, dtype=place.half)

        def call(x: Tensor = x, rows: LoraRows = rows) -> Tensor:
            y = x.new_zeros(len(x), sum(sizes))
            add_lora(y, x, stack, rows)
            return y

        calls.append(call)
    return calls


def _norms(place: Place) -> list[Call]:
    weight = place.randn(4096, seed=1, dtype=place.half)
    calls: list[Call] = []
    for rows in (32, 8192):
        x = place.randn(rows, 4096, seed=rows, dtype=place.half)
        calls.append(lambda x=x: add_rms_norm(torch.zeros_like(x), x, weight, 1e-5))  # type: ignore
    return calls


def _gates(place: Place) -> list[Call]:
    inputs = [place.randn(rows, 28_672, seed=rows, dtype=place.half) for rows in (32, 8192)]
    return [lambda x=x: swiglu(x) for x in inputs]  # type: ignore[misc]
