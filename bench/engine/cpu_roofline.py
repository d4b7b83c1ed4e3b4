"""Compute what this processor could do at best: tokens per second from bytes, operations and two
rates that are measured here, how fast memory is read and how fast it multiplies.

A step reads all weights once, and the keys and values of its sequences; it multiplies each weight
once for each token (two operations). Whichever takes longer is the floor of its time. Attention's
own products are left out, and so is everything but the layers and the head, so nobody can reach it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.tools.workload import Request

READ_BYTES = 1 << 30
MATRIX = 2048
REPEATS = 5


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Holds what memory and multipliers were measured to do, by torch's own operators."""

    bytes_per_s: float
    operations_per_s: dict[str, float]
    """By dtype, of a square product."""

    @staticmethod
    def measure() -> MachineRates:
        memory = torch.ones(READ_BYTES // 8, dtype=torch.int64)
        rates = {}
        for dtype in (torch.float32, torch.bfloat16, torch.int8):
            a, b = (torch.ones(MATRIX, MATRIX, dtype=dtype) for _ in range(2))
            product = torch._int_mm if dtype == torch.int8 else torch.mm
            seconds = _fastest_s(partial(product, a, b))
            rates[str(dtype).removeprefix("torch.")] = 2 * MATRIX**3 / seconds
        return MachineRates(READ_BYTES / _fastest_s(memory.sum), rates)

    def __str__(self) -> str:
        products = ", ".join(
            f"{dtype} {rate / 1e9:,.0f}" for dtype, rate in self.operations_per_s.items()
        )
        return f"memory {self.bytes_per_s / 1e9:.1f} GB/s, products in G operations/s: {products}"


@dataclass(frozen=True, slots=True)
class Roofline:
    bytes_per_s: float
    operations_per_s: float
    layer_weights: int
    head_weights: int
    kv_numbers: int
    """The key and value numbers of one token."""
    itemsize: int

    @staticmethod
    def of(shape: dict[str, Any], dtype: str, rates: MachineRates) -> Roofline:
        """Return that of a model of this shape."""
        hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
        head_dim = shape.get("head_dim", hidden // heads)
        kv = 2 * shape["num_key_value_heads"] * head_dim
        attention = hidden * (2 * heads * head_dim + kv)
        mlp = 3 * hidden * shape["intermediate_size"]
        return Roofline(
            bytes_per_s=rates.bytes_per_s,
            operations_per_s=rates.operations_per_s[dtype],
            layer_weights=shape["num_hidden_layers"] * (attention + mlp),
            head_weights=shape["vocab_size"] * hidden,
            kv_numbers=shape["num_hidden_layers"] * kv,
            itemsize=getattr(torch, dtype).itemsize,
        )

    def prefill_s(self, num_tokens: int) -> float:
        """The head is computed for the last token alone."""
        return self._step_s(num_tokens, 1, 0)

    def decode_s(self, num_sequences: int, num_context: int) -> float:
        """One step; num_context: tokens before it, of all sequences together."""
        return self._step_s(num_sequences, num_sequences, num_context)

    def mixed_s(self, requests: list[Request]) -> float:
        """All prompts at once, then all answers side by side."""
        total = self.prefill_s(sum(len(request.prompt) for request in requests))
        for step in range(1, max(request.num_output_tokens for request in requests)):
            going = [request for request in requests if request.num_output_tokens > step]
            total += self.decode_s(len(going), sum(len(r.prompt) + step for r in going))
        return total

    def _step_s(self, num_tokens: int, num_sampled: int, num_context: int) -> float:
        numbers = self.layer_weights + self.head_weights + self.kv_numbers * num_context
        products = self.layer_weights * num_tokens + self.head_weights * num_sampled
        read_s = numbers * self.itemsize / self.bytes_per_s
        return max(read_s, 2 * products / self.operations_per_s)


def _fastest_s(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)
