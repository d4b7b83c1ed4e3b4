"""The rows of `make gpu-bench`: what each measures, its floor, and what it is to reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from bench.gpu.floors import (
    BF16,
    FP8,
    Precision,
    Roofline,
    Shape,
    decode_step_s,
    mixed_s_per_token,
    prefill_s,
)

Floor = Callable[[Roofline, Shape], float]


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    title: str
    unit: Literal["ms", "tok/s", "TB/s", "TFLOP/s", "%", "x", "s"]
    measure: tuple[str, str, tuple[Any, ...]]
    """Module in `bench.gpu`, name in it, and the arguments that make it a measurement."""
    floor: Floor | None = None
    """The least time, or the highest rate, in SI units."""
    goal: float | None = None
    """With a floor the fraction of it to reach. Without, the least ("x") or the most."""

    @property
    def rate(self) -> bool:
        """More is better."""
        return self.unit in ("tok/s", "TB/s", "TFLOP/s", "x")

    def fraction(self, figure: float, floor: float) -> float:
        return figure / floor if self.rate else floor / figure

    def reached(self, figure: float, floor: float | None) -> bool | None:
        """None where nothing is to be reached."""
        if self.goal is None:
            return None
        if floor is not None:
            return self.fraction(figure, floor) >= self.goal
        return figure >= self.goal if self.rate else figure <= self.goal


SCALE = {"ms": 1e3, "tok/s": 1.0, "TB/s": 1e-12, "TFLOP/s": 1e-12, "%": 1e2, "x": 1.0, "s": 1.0}


def shown(value: float, unit: str) -> str:
    """In its unit, three digits or so."""
    scaled = value * SCALE[unit]
    digits = 0 if abs(scaled) >= 100 else 1 if abs(scaled) >= 20 else 2
    return f"{scaled:,.{digits}f} {unit}"


def _decode(batch: int, precision: Precision) -> Floor:
    return lambda roofline, shape: decode_step_s(roofline, shape, batch, 1024, precision)


def _prefill(precision: Precision) -> Floor:
    return lambda roofline, shape: prefill_s(roofline, shape, 8192, precision)


def _mixed(roofline: Roofline, shape: Shape) -> float:
    return 1 / mixed_s_per_token(roofline, shape, 1000, 1000)


def _bytes(roofline: Roofline, shape: Shape) -> float:
    return roofline.bytes_per_s


def _flops(roofline: Roofline, shape: Shape) -> float:
    return roofline.bf16_flops


ENGINE = "engine_rows"
ROWS = (
    Row(
        "decode-attention", "decode attention kernel, 32 x 32k tokens of KV", "TB/s",
        ("kernel_rows", "decode_attention", ()), _bytes, 0.85,
    ),
    Row(
        "prefill-attention-4k", "prefill attention kernel, head_dim 128, causal, 4k", "TFLOP/s",
        ("kernel_rows", "prefill_attention", (4096,)), _flops, 0.60,
    ),
    Row(
        "prefill-attention-16k", "the same, 16k", "TFLOP/s",
        ("kernel_rows", "prefill_attention", (16_384,)), _flops, 0.60,
    ),
    Row(
        "graphs", "recording the graphs of decodes", "s",
        ("start_rows", "graph_capture", ()), None, 10.0,
    ),
    Row(
        "decode-1-bf16", "decode batch 1, bf16", "ms",
        (ENGINE, "decode", ("bf16", 1)), _decode(1, BF16), 0.82,
    ),
    Row(
        "decode-32-bf16", "decode batch 32, bf16", "ms",
        (ENGINE, "decode", ("bf16", 32)), _decode(32, BF16), 0.78,
    ),
    Row(
        "decode-256-bf16", "decode batch 256, bf16", "ms",
        (ENGINE, "decode", ("bf16", 256)), _decode(256, BF16), 0.72,
    ),
    Row(
        "prefill-bf16", "prefill 8,192, bf16", "ms",
        (ENGINE, "prefill", ("bf16", 8192)), _prefill(BF16), 0.72,
    ),
    Row(
        "host-gap", "host gap between steps, batch 32, of the step", "%",
        (ENGINE, "host_gap", ()), None, 0.03,
    ),
    Row(
        "decode-32-fp8", "decode batch 32, fp8 weights and KV", "ms",
        (ENGINE, "decode", ("fp8", 32)), _decode(32, FP8), 0.70,
    ),
    Row(
        "decode-256-fp8", "decode batch 256, fp8 weights and KV", "ms",
        (ENGINE, "decode", ("fp8", 256)), _decode(256, FP8), 0.70,
    ),
    Row(
        "prefill-fp8", "prefill 8,192, fp8", "ms",
        (ENGINE, "prefill", ("fp8", 8192)), _prefill(FP8), 0.65,
    ),
    Row(
        "mixed-fp8", "mixed 1000 in / 1000 out, fp8, maximum throughput", "tok/s",
        (ENGINE, "mixed", ()), _mixed, 0.70,
    ),
    Row(
        "prefix-cache", "loss by the prefix cache at 0% hits", "%",
        (ENGINE, "prefix_cache", ()), None, 0.01,
    ),
    Row(
        "deterministic", "cost of the deterministic mode, decode batch 32", "%",
        (ENGINE, "deterministic", ()),
    ),
    Row(
        "start", "start to first token, warm page cache, 8B bf16", "s",
        ("start_rows", "first_token", ()), None, 15.0,
    ),
    Row(
        "replay", "mixed replay against transformers' continuous batching", "x",
        ("peer_rows", "replay", ()), None, 5.0,
    ),
)  # fmt: skip
"""In the order in which they are measured: rows that share an engine stand together."""
ROOFLINE = "roofline"


def named(name: str) -> Row:
    return next(row for row in ROWS if row.name == name)


def measurement(name: str) -> Callable[[Any], dict[str, Any]]:
    """Return what measures the row, given the `Ground`; imports torch."""
    from importlib import import_module

    if name == ROOFLINE:
        module, function, arguments = "kernel_rows", "roofline", ()
    else:
        module, function, arguments = named(name).measure
    found = getattr(import_module(f"bench.gpu.rows.{module}"), function)
    made: Callable[[Any], dict[str, Any]] = found(*arguments) if arguments else found
    return made
