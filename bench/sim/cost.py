"""Holds what the steps of a simulated engine cost (`engine.scheduling.step_costs`): fitted to a
real one, or computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from bench.gpu.floors import H200, Roofline, Shape
from bench.gpu.models import LLAMA_8B, shape_of
from engine.protocol import StepCosts

FOLDER = Path(__file__).parent


class Cost(StepCosts, frozen=True, kw_only=True):
    """The costs, and whence they are."""

    fitted: dict[str, Any] = {}
    """To what and where, for who reads the file."""

    def request_s(self, prompt: int, answer: int, *, cached: int = 0, beside: int = 32) -> float:
        """Estimate what a request takes of the machine, where so many are decoded at once."""
        new = prompt - cached
        context = prompt + answer / 2
        each = self.step_s / beside + self.decode_s + self.context_token_s * context
        return self.prompt_token_s * new + self.pair_s * new * (cached + new / 2) + answer * each


def load(path: Path) -> Cost:
    return msgspec.json.decode(path.read_bytes(), type=Cost)


def save(cost: Cost, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(cost), indent=2) + b"\n")


def floor(roofline: Roofline = H200, shape: Shape | None = None) -> Cost:
    """Computed, not measured: the sum of what a step cannot do without on a GPU, in bfloat16, of
    Llama-3.1-8B if no shape is named. For loads that no CPU is there for."""
    shape = shape or shape_of(LLAMA_8B)
    weights = shape.layer_parameters + shape.head_parameters
    flops = roofline.bf16_flops
    return Cost(
        step_s=2 * weights / roofline.bytes_per_s,
        decode_s=2 * weights / flops,
        prompt_token_s=2 * shape.layer_parameters / flops,
        context_token_s=shape.kv_bytes(1, 2) / roofline.bytes_per_s,
        chunk_context_token_s=shape.kv_bytes(1, 2) / roofline.bytes_per_s,
        pair_s=4 * shape.num_heads * shape.head_dim * shape.num_layers / flops,
        fitted={"computed": "from the roofline of an H200, for Llama-3.1-8B in bfloat16"},
    )
