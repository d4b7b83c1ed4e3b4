"""Measures what the device does at best, and how near attention comes to it.

Knows no engine.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu.ground import Ground
from bench.gpu.paged_steps import PagedStep, attention_bytes, attention_flops, shape_of
from bench.gpu.place import Place
from engine.kernels.attention.types import AttentionShape, to_device

LONG_KV = ((1, 131_072), (32, 32_768), (256, 4096))
"""(sequences, tokens of each); the second is the row's figure."""


def roofline(ground: Ground) -> dict[str, Any]:
    """A copy of gigabytes within the device, bytes read and written; products of 8192 x 8192 x 8192
    on random data."""
    place = ground.place
    count = place.pick(1 << 29, 1 << 17)
    source = torch.randint(1 << 62, (count,), dtype=torch.int64, device=place.device)
    target = torch.empty_like(source)
    copied = 2 * count * source.element_size() / place.median_s(lambda: target.copy_(source))
    size = place.pick(8192, 64)
    a, b = (place.randn(size, size, seed=i, dtype=place.half) for i in (1, 2))
    operations = 2 * size**3
    bf16 = operations / place.median_s(lambda: a @ b)
    return {
        "bytes_per_s": copied,
        "bf16_flops": bf16,
        "fp8_flops": operations / _fp8_s(place, size),
    }


def _fp8_s(place: Place, size: int) -> float:
    """Return the seconds of a product with one scale for all, or one for every row and column as
    linear layers have: the faster one is what the device can do.
    """
    a, b = (
        place.randn(size, size, seed=i).clamp(-448, 448).to(torch.float8_e4m3fn) for i in (3, 4)
    )
    one, ones = (torch.ones(shape, device=place.device) for shape in ((), (size, 1)))
    if place.tiny:  # no such product on a CPU
        wide = a.float(), b.float()
        return place.median_s(lambda: wide[0] @ wide[1])

    def multiply(scale: Tensor) -> Tensor:
        across = scale.t() if scale.dim() else scale
        return torch._scaled_mm(a, b.t(), scale_a=scale, scale_b=across, out_dtype=torch.bfloat16)

    return min(place.median_s(partial(multiply, scale)) for scale in (one, ones))


def _attend_s(place: Place, step: PagedStep) -> float:
    from engine.kernels.attention.triton import TritonAttentionPlan

    shape = step.shape
    out = torch.empty(
        len(step.q), shape.num_heads * shape.head_dim, dtype=shape.dtype, device=place.device
    )
    plan = TritonAttentionPlan(to_device(step.metadata, shape), shape, None, out=out)
    return place.median_s(lambda: plan.attend(step.q, step.cache))


def _shape(place: Place, **more: Any) -> AttentionShape:
    heads, head_dim = place.pick(((32, 8), 128), ((4, 2), 64))
    return shape_of(heads, head_dim, place.device, place.half, **more)


def decode_attention(ground: Ground) -> dict[str, Any]:
    """Bytes a second of keys, values, queries and results of one layer."""
    place, detail = ground.place, {}
    for seqs, tokens in place.pick(LONG_KV, ((1, 200), (2, 100), (3, 50))):
        for name, cache in (("", None), (" fp8", torch.float8_e4m3fn)):
            step = PagedStep(place, _shape(place, cache_dtype=cache), [(1, tokens)] * seqs)
            moved = attention_bytes(step.metadata, step.shape, None)
            detail[f"{seqs} x {tokens}{name}"] = moved / _attend_s(place, step)
            del step
    main = place.pick("32 x 32768", "2 x 100")
    return {"figure": detail[main], "detail": detail}


def prefill_attention(tokens: int) -> Any:
    def measure(ground: Ground) -> dict[str, Any]:
        """Operations a second of one layer over prompts with nothing before them."""
        place = ground.place
        length = place.pick(tokens, 40)
        seqs = [(length, length)] * place.pick(16_384 // tokens, 1)
        detail: dict[str, float] = {}
        for name, fixed in (("figure", False), ("deterministic", True)):
            step = PagedStep(place, _shape(place, deterministic=fixed), seqs)
            operations = attention_flops(step.metadata, step.shape, None)
            detail[name] = operations / _attend_s(place, step)
        return {"figure": detail.pop("figure"), "detail": detail}

    return measure
