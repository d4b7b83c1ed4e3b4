"""Estimate what a step takes, as a sum over what is in it.

    seconds = step + decode * decodes + prompt_token * prompt tokens
            + context_token * context tokens of decodes + pair * pairs of prompts
            + chunk_context_token * context tokens of chunks

A decode reads all its context once. A token of a prompt is paired with each one before it; what a
pair takes there is a constant of its own, for a chunk reads its context once for all its tokens:
that it does so is the last term, of which a processor, slow at pairs, has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from bench.gpu.floors import H200, Roofline, Shape
from bench.gpu.models import LLAMA_8B, shape_of
from engine.scheduling.step_plan import ScheduledSequence

FOLDER = Path(__file__).parent


class Parts(msgspec.Struct, frozen=True):
    """The parts of a step."""

    decodes: int
    prompt_tokens: int
    context_tokens: int
    pairs: float
    chunk_context_tokens: int = 0

    @staticmethod
    def of(scheduled: Iterable[ScheduledSequence]) -> Parts:
        decodes = prompt_tokens = context_tokens = chunk_context_tokens = 0
        pairs = 0.0
        for entry in scheduled:
            num_tokens, start = entry.num_new_tokens, entry.start
            if num_tokens == 1 and entry.samples:
                decodes += 1
                context_tokens += start + 1
            else:
                prompt_tokens += num_tokens
                chunk_context_tokens += start
                pairs += num_tokens * (start + (num_tokens + 1) / 2)
        return Parts(decodes, prompt_tokens, context_tokens, pairs, chunk_context_tokens)


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, all at least 0."""

    step_s: float
    decode_s: float
    prompt_token_s: float
    context_token_s: float
    pair_s: float
    chunk_context_token_s: float = 0.0
    fitted: dict[str, Any] = {}
    """To what and where, for who reads the file."""

    def of(self, parts: Parts) -> float:
        return (
            self.step_s
            + self.decode_s * parts.decodes
            + self.prompt_token_s * parts.prompt_tokens
            + self.context_token_s * parts.context_tokens
            + self.pair_s * parts.pairs
            + self.chunk_context_token_s * parts.chunk_context_tokens
        )

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
