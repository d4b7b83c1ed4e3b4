"""Random steps of paged attention on the device, and their exact result.

Blocks lie in random order. What no token owns is not a number, and so is the block that table
entries point to which must not be read: reading it shows, and does not end the process.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.gpu.findings import poison
from bench.gpu.place import Place
from engine.kernels.attention.types import (
    AttentionMetadata,
    AttentionShape,
    DeviceMetadata,
    KVLayer,
    to_device,
)

BLOCK_SIZE = 16
SCORES_AT_ONCE = 1 << 27
"""float64 scores of the exact result that are in memory at once: 1 GiB."""


def shape_of(
    heads: tuple[int, int],
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    *,
    deterministic: bool = False,
) -> AttentionShape:
    """heads: of queries, of keys"""
    return AttentionShape(*heads, head_dim, BLOCK_SIZE, dtype, device, cache_dtype, deterministic)


class PagedStep:
    """`seqs` are (new tokens, all tokens), those with one new token first, longest first."""

    def __init__(
        self,
        place: Place,
        shape: AttentionShape,
        seqs: Sequence[tuple[int, int]],
        *,
        window: int | None = None,
        seed: int = 0,
        first_block: int = 1,
    ) -> None:
        """first_block: where in a larger cache the step's blocks begin; block 0 is nobody's."""
        self.seqs, self.shape, self.window = list(seqs), shape, window
        lens, totals = (np.array(column) for column in zip(*seqs, strict=True))
        blocks = -(-totals // BLOCK_SIZE)
        owned = np.random.default_rng(seed).permutation(int(blocks.sum())) + first_block
        tables = np.zeros((len(seqs), int(blocks.max())), np.int64)
        seen = np.zeros_like(totals)
        if window is not None:
            seen = np.maximum(totals - lens - window + 1, 0)
        for row, count, first in zip(tables, blocks, seen // BLOCK_SIZE, strict=True):
            row[first:count], owned = owned[first:count], owned[count:]
        self.metadata = AttentionMetadata(lens, totals, tables, int((lens == 1).sum()))
        num_blocks = first_block + int(blocks.sum())
        self.cache = self._filled(place, num_blocks, seen, seed)
        # Rows of queries lie inside rows of a wider product.
        wide = (int(lens.sum()), shape.num_heads + 2, shape.head_dim)
        self.q = place.randn(*wide, seed=seed + 1, dtype=shape.dtype)[:, : shape.num_heads]

    def _filled(self, place: Place, num_blocks: int, seen: np.ndarray, seed: int) -> KVLayer:
        shape = self.shape
        stored = shape.cache_dtype or shape.dtype
        scales: list[Tensor | None] = [None, None]
        if stored == torch.float8_e4m3fn:
            scale = torch.rand(
                2, shape.num_kv_heads, generator=place.generator(seed), device=place.device
            )
            scales = list(scale * 0.02 + 0.005)
        tensors: list[Tensor] = []
        at = self._owned_slots(seen)
        for i, by in enumerate(scales):
            size = (num_blocks, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
            tensor = torch.empty(size, dtype=stored, device=place.device)
            poison(tensor)
            drawn = place.randn(len(at), *size[1::2], seed=seed + 2 + i)
            if by is not None:
                drawn = drawn / by[:, None]
            self._put(tensor, at, drawn.to(stored))
            tensors.append(tensor)
        return KVLayer(tensors[0], tensors[1], scales[0], scales[1])

    def _owned_slots(self, seen: np.ndarray) -> Tensor:
        """Slots of every token that a query may see."""
        slots = [
            table[np.arange(first, total) // BLOCK_SIZE] * BLOCK_SIZE
            + np.arange(first, total) % BLOCK_SIZE
            for table, first, total in zip(
                self.metadata.block_tables, seen, self.metadata.seq_lens, strict=True
            )
        ]
        return torch.from_numpy(np.concatenate(slots)).to(self.shape.device)

    @staticmethod
    def _put(tensor: Tensor, slots: Tensor, rows: Tensor) -> None:
        """rows [N, kv_heads, head_dim] to their slots; as bytes, which float8 can be put as."""
        raw, size = tensor.view(torch.uint8), rows.view(torch.uint8)
        raw[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE] = size

    def run(self, metadata: DeviceMetadata | None = None, rows: Tensor | None = None) -> Tensor:
        """Return what the kernels write over poison; all rows, or those of another step over this
        one's cache.
        """
        from engine.kernels.attention.triton import TritonAttentionPlan

        shape, q = self.shape, self.q if rows is None else self.q[rows]
        size = (len(q), shape.num_heads * shape.head_dim)
        out = torch.full(size, torch.nan, dtype=shape.dtype, device=shape.device)
        given = metadata or to_device(self.metadata, shape)
        return TritonAttentionPlan(given, shape, self.window, out=out).attend(q, self.cache)

    def exact(self) -> Tensor:
        """float64 [T, num_heads * head_dim], from what the cache holds."""
        out, row = [], 0
        for i, (new, _) in enumerate(self.seqs):
            out.append(self._exact_of(i, self.q[row : row + new]))
            row += new
        return torch.cat(out)

    def _exact_of(self, index: int, q: Tensor) -> Tensor:
        shape, (new, total) = self.shape, self.seqs[index]
        group = shape.num_heads // shape.num_kv_heads
        first = 0 if self.window is None else max(0, total - new - self.window + 1)
        at = np.arange(first, total)
        table = self.metadata.block_tables[index]
        slots = torch.from_numpy(table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE)
        slots = slots.to(shape.device)
        keys = self._plain(self.cache.k, self.cache.k_scale, slots)
        values = self._plain(self.cache.v, self.cache.v_scale, slots)
        position = torch.arange(total - new, total, device=shape.device)
        key_at = torch.arange(first, total, device=shape.device)
        tile = max(1, SCORES_AT_ONCE // (len(at) * group))
        rows = []
        for start in range(0, new, tile):
            own, heads = position[start : start + tile, None], []
            hidden = key_at > own
            if self.window is not None:
                hidden |= key_at <= own - self.window
            for head in range(shape.num_heads):
                kv = head // group
                scores = q[start : start + tile, head].double() @ keys[:, kv].t()
                scores.mul_(shape.head_dim**-0.5).masked_fill_(hidden, -torch.inf)
                heads.append(torch.softmax(scores, -1) @ values[:, kv])
            rows.append(torch.cat(heads, dim=1))
        return torch.cat(rows)

    @staticmethod
    def _plain(stored: Tensor, scale: Tensor | None, slots: Tensor) -> Tensor:
        """float64 [N, kv_heads, head_dim]"""
        raw = stored.view(torch.uint8)[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE]
        plain = raw.view(stored.dtype).double()
        return plain if scale is None else plain * scale.double()[:, None]


def attention_flops(metadata: AttentionMetadata, shape: AttentionShape, window: int | None) -> int:
    """Floating-point operations one layer's attention must do: a product and a sum for each channel
    of each visible (query, head, key), for the scores and again for the values."""
    return 4 * shape.num_heads * shape.head_dim * int(_visible_keys(metadata, window).sum())


def attention_bytes(metadata: AttentionMetadata, shape: AttentionShape, window: int | None) -> int:
    """The fewest bytes one layer's attention must move: queries and results once, and of every
    sequence each key and value that any of its queries sees once."""
    lens, seq_lens = metadata.query_lens, metadata.seq_lens
    keys = seq_lens if window is None else np.minimum(seq_lens, window + lens - 1)
    stored = (shape.cache_dtype or shape.dtype).itemsize
    cached = 2 * shape.num_kv_heads * int(keys.sum()) * stored
    passing = 2 * shape.num_heads * int(lens.sum()) * shape.dtype.itemsize
    return (cached + passing) * shape.head_dim


def _visible_keys(metadata: AttentionMetadata, window: int | None) -> NDArray[np.int64]:
    """[T] keys that each new token sees."""
    lens = metadata.query_lens
    ends = np.cumsum(lens)
    seen = np.arange(ends[-1]) + np.repeat(metadata.seq_lens - ends, lens) + 1
    return seen if window is None else np.minimum(seen, window)
