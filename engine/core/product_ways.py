"""Prepares the products that are measured against each other, on memory of their own.

Weights come from memory, not from a cache, as in a step that passes through all layers: each call
reads the next window of a scratch larger than most caches. A large product is measured on a part of
its outputs, which are independent of each other. One thread measures: more draw from the same
counter whatever they multiply by, and would measure who else wants the processor.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from engine.kernels.attention.cpu import CpuAttentionPlan, cpu_attends, library_for
from engine.kernels.attention.types import AttentionMetadata, AttentionShape, KVLayer
from engine.kernels.choice.machine import this_machine
from engine.kernels.choice.microkernel import Microkernel, microkernel
from engine.kernels.choice.products import (
    LIBRARY,
    OWN,
    LinearShape,
    PromptShape,
    Run,
    Shape,
    choose_products,
)
from engine.kernels.cpu.backend import LANES, kernel
from engine.kernels.cpu.compiling.kernel_cache import kernel_cache
from engine.kernels.linear.cpu import PANEL, PanelProduct

SCRATCH_BYTES, WINDOW_BYTES = 64 << 20, 8 << 20
MOST_WINDOWS = 128
MOST_MULTIPLICATIONS = 1 << 28
"""The most of one call, which then takes about a millisecond."""
PROMPT_TOKENS, CONTEXT_TOKENS = 256, 512
DTYPE = torch.bfloat16
KERNELS = (
    ("linear", "linear"),
    ("library_linear", "library_linear"),
    ("attention", "attend"),
    ("plan", "plan"),
)


def choose_measured(shape: AttentionShape) -> None:
    """Choose for all layers that were made, and for attention of this shape."""
    if cpu_attends(shape):
        library_for(shape)
    machine = this_machine()
    torch.set_num_threads(1)
    try:
        choose_products(machine, lambda: kernel_cache().folder, Ways)
    finally:
        torch.set_num_threads(machine.threads)


class Ways:
    """Makes the runs of a question; holds their memory."""

    def __init__(self) -> None:
        for module, name in KERNELS:
            kernel(module, name)  # nobody measures how long they take to load

    def __call__(self, shape: Shape, rows: int) -> Mapping[str, Run]:
        library = microkernel()
        assert library is not None, "there is nothing to choose from"
        if isinstance(shape, PromptShape):
            return _attend(shape, library)
        return self._multiply(shape, rows, library)

    @cached_property
    def _memory(self) -> Tensor:
        return torch.ones(SCRATCH_BYTES // DTYPE.itemsize, dtype=DTYPE)

    def _multiply(self, shape: LinearShape, rows: int, library: Microkernel) -> Mapping[str, Run]:
        inputs = shape.inputs
        most = min(WINDOW_BYTES // DTYPE.itemsize, MOST_MULTIPLICATIONS // rows) // inputs
        outputs = max(PANEL, min(shape.outputs, most) // PANEL * PANEL)
        size = outputs * inputs
        count = min(MOST_WINDOWS, len(self._memory) // size)
        windows = self._memory[: count * size].view(count, outputs // PANEL, inputs // 2, PANEL, 2)
        products = cycle([PanelProduct(each, (outputs, inputs), DTYPE) for each in windows])
        x = torch.ones(rows, inputs, dtype=DTYPE)
        return {
            OWN: lambda: _drop(next(products).by_own_tiles(x)),
            LIBRARY: lambda: _drop(next(products).by_library(library, x)),
        }


def _attend(shape: PromptShape, library: Microkernel) -> Mapping[str, Run]:
    num_blocks = CONTEXT_TOKENS // LANES
    metadata = AttentionMetadata(
        query_lens=np.array([PROMPT_TOKENS]),
        seq_lens=np.array([CONTEXT_TOKENS]),
        block_tables=np.arange(num_blocks)[None],
        num_single=0,
    )
    full = AttentionShape(
        shape.heads, shape.kv_heads, shape.head_dim, LANES, DTYPE, torch.device("cpu")
    )
    size = (num_blocks, shape.kv_heads, LANES, shape.head_dim)
    cache = KVLayer(torch.ones(size, dtype=DTYPE), torch.ones(size, dtype=DTYPE))
    q = torch.ones(PROMPT_TOKENS, shape.heads, shape.head_dim, dtype=DTYPE)

    def run(product: Microkernel | None) -> None:
        CpuAttentionPlan(metadata, full, None, product).attend(q, cache)

    return {OWN: partial(run, None), LIBRARY: partial(run, library)}


def _drop(_: Tensor) -> None:
    """Nobody wants the result."""
