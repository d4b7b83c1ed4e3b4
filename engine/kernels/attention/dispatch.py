"""Chooses who computes the causal attention of a step over the paged KV cache."""

from __future__ import annotations

from collections.abc import Callable

from engine.kernels.attention.cpu import CpuAttentionPlan, cpu_attends
from engine.kernels.attention.deterministic import FixedAttentionPlan
from engine.kernels.attention.reference import TorchAttentionPlan
from engine.kernels.attention.types import (
    AttentionMetadata,
    AttentionPlan,
    AttentionShape,
    to_device,
)
from engine.kernels.backend import uses_triton


def attention_planner(
    shape: AttentionShape,
) -> Callable[[AttentionMetadata, AttentionShape, int | None], AttentionPlan]:
    """Return what prepares the attention of a step that the host knows, under one window.

    A window is how many tokens a query sees, itself included (Mistral, arXiv:2310.06825); None: all
    before it.
    """
    if uses_triton(shape.device):
        return _plan_on_device
    if cpu_attends(shape):
        return CpuAttentionPlan.measured
    if shape.deterministic:
        return FixedAttentionPlan
    return TorchAttentionPlan


def _plan_on_device(
    metadata: AttentionMetadata, shape: AttentionShape, window: int | None
) -> AttentionPlan:
    from engine.kernels.attention.triton import TritonAttentionPlan

    return TritonAttentionPlan(to_device(metadata, shape), shape, window)
