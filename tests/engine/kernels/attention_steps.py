"""Random steps of paged attention, their exact result, and what the plan makes of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from bench.gpu.paged_steps import BLOCK_SIZE
from bench.gpu.paged_steps import shape_of as shape_of  # the tests take it from here
from engine.kernels.attention.types import (
    AttentionMetadata,
    AttentionShape,
    DeviceMetadata,
    KVLayer,
    to_device,
)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass
class Step:
    """`seqs` are (new tokens, all tokens), those with one new token first."""

    seqs: list[tuple[int, int]]
    shape: AttentionShape
    window: int | None
    seed: int
    q: Tensor = field(init=False)
    cache: KVLayer = field(init=False)
    metadata: AttentionMetadata = field(init=False)

    def __post_init__(self) -> None:
        shape, draw = self.shape, np.random.default_rng(self.seed)
        torch.manual_seed(self.seed)
        lens = np.array([new for new, _ in self.seqs])
        seq_lens = np.array([total for _, total in self.seqs])
        blocks = -(-seq_lens // BLOCK_SIZE)
        # The first token that any query of this step sees.
        seen = np.zeros_like(seq_lens)
        if self.window is not None:
            seen = np.maximum(seq_lens - lens - self.window + 1, 0)
        num_blocks = int(blocks.sum()) + 2
        free = draw.permutation(num_blocks)
        # Entries behind a sequence's end or before its window are never read: let them point to
        # nowhere.
        tables = np.full((len(lens), int(blocks.max())), 1 << 30, np.int64)
        for row, count, first in zip(tables, blocks, seen // BLOCK_SIZE, strict=True):
            row[first:count], free = free[first:count], free[count:]
        self.metadata = AttentionMetadata(lens, seq_lens, tables, int((lens == 1).sum()))
        size = (num_blocks, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
        # What no token owns is not a number, and must not be read into any result.
        stored = torch.full((2, *size), torch.nan)
        for row, first, total in zip(tables, seen, seq_lens, strict=True):
            for i in range(first, total):
                stored[:, row[i // BLOCK_SIZE], :, i % BLOCK_SIZE] = torch.randn(2, *size[1::2])
        # Rows of queries lie inside rows of a wider product.
        wide = torch.randn(int(lens.sum()), shape.num_heads + 2, shape.head_dim)
        self.q = wide.to(shape.dtype).to(shape.device)[:, : shape.num_heads]
        dtype = shape.cache_dtype or shape.dtype
        scales: list[Tensor | None] = [None, None]
        if dtype == torch.float8_e4m3fn:
            scales = list((torch.rand(2, shape.num_kv_heads) * 0.02 + 0.005).to(shape.device))
            stored = stored / torch.stack([s.cpu() for s in scales])[:, None, :, None, None]  # type: ignore[union-attr]
        k, v = stored.to(dtype).to(shape.device)
        self.cache = KVLayer(k, v, *scales)

    def exact(self) -> Tensor:
        """float64 [T, num_heads * head_dim], from what the cache holds."""
        shape, out, row = self.shape, [], 0
        group = shape.num_heads // shape.num_kv_heads
        k, v = (
            _plain(stored, scale)
            for stored, scale in (
                (self.cache.k, self.cache.k_scale),
                (self.cache.v, self.cache.v_scale),
            )
        )
        for (new, total), table in zip(self.seqs, self.metadata.block_tables, strict=True):
            first = 0 if self.window is None else max(0, total - new - self.window + 1)
            at = torch.arange(first, total)
            blocks = torch.from_numpy(table)[at // BLOCK_SIZE]
            keys = k[blocks, :, at % BLOCK_SIZE].repeat_interleave(group, 1)
            values = v[blocks, :, at % BLOCK_SIZE].repeat_interleave(group, 1)
            q = self.q[row : row + new].double().cpu() * shape.head_dim**-0.5
            scores = torch.einsum("qhd,khd->hqk", q, keys)
            position = torch.arange(total - new, total)[:, None]
            seen = at <= position
            if self.window is not None:
                seen &= at > position - self.window
            weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
            out.append(torch.einsum("hqk,khd->qhd", weights, values).flatten(1))
            row += new
        return torch.cat(out)

    def run(self, metadata: DeviceMetadata | None = None) -> Tensor:
        """Return what the kernels write over poison."""
        from engine.kernels.attention.triton import TritonAttentionPlan

        shape = self.shape
        out = torch.full(
            (len(self.q), shape.num_heads * shape.head_dim),
            torch.nan,
            dtype=shape.dtype,
            device=shape.device,
        )
        plan = TritonAttentionPlan(
            metadata or to_device(self.metadata, shape), shape, self.window, out=out
        )
        return plan.attend(self.q, self.cache)


def part(whole: Step, row: int, first: int, last: int) -> tuple[AttentionMetadata, slice]:
    """Tokens [first, last) of one sequence of `whole`, whose cache holds the keys of all; and their
    rows of its queries. Every sequence of `whole` must be all new."""
    start = sum(total for _, total in whole.seqs[:row]) + first
    table = whole.metadata.block_tables[row : row + 1]
    lens = np.array([last - first])
    meta = AttentionMetadata(lens, np.array([last]), table, int(last - first == 1))
    return meta, slice(start, start + last - first)


def _plain(stored: Tensor, scale: Tensor | None) -> Tensor:
    plain = stored.cpu().double()
    return plain if scale is None else plain * scale.cpu().double()[:, None, None]


def error(found: Tensor, exact: Tensor) -> float:
    """Relative, in the L2 norm; not a number where anything was left unwritten."""
    return float((found.double().cpu() - exact).norm() / exact.norm())
