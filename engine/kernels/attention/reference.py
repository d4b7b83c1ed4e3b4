"""Attention by torch's own operations, on any device: the reference of the kernels.

It works on bounded gathers. Sequences that decode one token are grouped, longest first, so that a
group's gathered keys stay near the cache and little of them is padding; prompt chunks run one by
one in tiles of queries. Padding repeats a row that the sequence owns: memory of another sequence is
never read, not even under a mask (0 * NaN is NaN).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.attention.types import (
    AttentionMetadata,
    AttentionShape,
    KVLayer,
    new_slots,
    store_rows,
)

GATHER_BYTES = 2 * 1024 * 1024
"""Keys gathered at once for a group of decodes: about a core's cache. Measured best at 1-4 MiB."""
QUERY_TILE = 128
"""Queries of a prompt chunk scored at once; a causal tile skips the keys after it."""
MIN_QUERY_TILE = 16
MAX_SCORES = 1 << 24
"""Attention scores (heads x queries x keys) in memory at once; long contexts shrink the tile."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries [query_start, query_stop) of each sequence of a segment against its gathered keys
    [key_start, key_stop); `mask` [B, 1, 1, queries, m] hides (True) among the last m of them."""

    query_start: int
    query_stop: int
    key_start: int
    key_stop: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Segment:
    """Sequences that are computed together: many with one query each, or one with many."""

    row_start: int
    num_seqs: int
    num_queries: int
    """The queries of each sequence; rows are [row_start, row_start + num_seqs * num_queries)."""
    gather: Tensor
    """[num_seqs * num_kv_heads * num_keys] rows of the cache viewed as [-1, head_dim]."""
    num_keys: int
    tiles: tuple[_Tile, ...]


class TorchAttentionPlan:
    """The reference implementation of `AttentionPlan`, on any device."""

    def __init__(
        self, metadata: AttentionMetadata, shape: AttentionShape, window: int | None
    ) -> None:
        self._shape = shape
        self._metadata = metadata
        self._window = window
        self._scale = float(shape.head_dim) ** -0.5
        self._write_rows = self._plan_write()
        self._segments = (*self._plan_singles(), *self._plan_chunks())
        # Where keys and values are gathered to. Fresh memory for every layer would cost more than
        # the copy: the system hands it out page by page.
        largest = max(len(segment.gather) for segment in self._segments)
        self._k, self._v = torch.empty(
            2, largest, shape.head_dim, dtype=shape.dtype, device=shape.device
        )

    @property
    def slots(self) -> Tensor:
        return self._tensor(new_slots(self._metadata, self._shape.block_size))

    def write(self, k: Tensor, v: Tensor, cache: KVLayer) -> None:
        store_rows(k, cache.k, cache.k_scale, self._write_rows)
        store_rows(v, cache.v, cache.v_scale, self._write_rows)

    def attend(self, q: Tensor, cache: KVLayer) -> Tensor:
        shape = self._shape
        out = q.new_empty(q.shape[0], shape.num_heads * shape.head_dim)
        for segment in self._segments:
            k = self._gathered(cache.k, cache.k_scale, segment, self._k)
            v = self._gathered(cache.v, cache.v_scale, segment, self._v)
            for tile in segment.tiles:
                num_rows = (tile.query_stop - tile.query_start) * segment.num_seqs
                start = segment.row_start + tile.query_start
                rows = slice(start, start + num_rows)
                out[rows] = self._attend_tile(
                    q[rows],
                    k[:, tile.key_start : tile.key_stop],
                    v[:, tile.key_start : tile.key_stop],
                    segment.num_seqs,
                    tile.mask,
                )
        return out

    def _gathered(
        self, stored: Tensor, scale: Tensor | None, segment: _Segment, buffer: Tensor
    ) -> Tensor:
        """A segment's keys or values, [B * kv_heads, num_keys, head_dim]."""
        heads, head_dim = self._shape.num_kv_heads, self._shape.head_dim
        size = (segment.num_seqs * heads, segment.num_keys, head_dim)
        rows = buffer[: len(segment.gather)]
        flat = stored.view(-1, head_dim)
        if scale is None:
            return torch.index_select(flat, 0, segment.gather, out=rows).view(size)
        raw = flat.view(torch.uint8).index_select(0, segment.gather).view(stored.dtype)
        by_head = raw.float().view(segment.num_seqs, heads, -1) * scale[:, None]
        return rows.copy_(by_head.view(rows.shape)).view(size)

    def _attend_tile(
        self, q: Tensor, k: Tensor, v: Tensor, num_seqs: int, mask: Tensor | None
    ) -> Tensor:
        """q [B * n, heads, head_dim]; k, v [B * kv_heads, keys, head_dim] -> [B * n, heads * dim].

        The query heads that share a KV head are folded into the query axis, so that grouped-query
        attention (arXiv:2305.13245) copies no keys.
        """
        kv_heads, head_dim = self._shape.num_kv_heads, self._shape.head_dim
        groups = self._shape.num_heads // kv_heads
        num_queries, num_keys = q.shape[0] // num_seqs, k.shape[1]
        split = (num_seqs, num_queries, kv_heads, groups, head_dim)
        folded = (q * self._scale).view(split).permute(0, 2, 3, 1, 4)
        folded = folded.reshape(num_seqs * kv_heads, groups * num_queries, head_dim)
        scores = torch.bmm(folded, k.transpose(1, 2))
        if mask is not None:
            by_query = scores.view(num_seqs, kv_heads, groups, num_queries, num_keys)
            by_query[..., num_keys - mask.shape[-1] :].masked_fill_(mask, float("-inf"))
        mixed = torch.bmm(torch.softmax(scores, dim=-1), v)
        mixed = mixed.view(num_seqs, kv_heads, groups, num_queries, head_dim)
        return mixed.permute(0, 3, 1, 2, 4).reshape(num_seqs * num_queries, -1)

    def _rows(self, blocks: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Cache rows of (block, offset) pairs [..., n] for every KV head: [..., kv_heads, n]."""
        block_size, kv_heads = self._shape.block_size, self._shape.num_kv_heads
        first = blocks * (kv_heads * block_size) + offsets
        return first[..., None, :] + np.arange(kv_heads)[:, None] * block_size

    def _tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array.reshape(-1)).to(self._shape.device)

    def _plan_write(self) -> Tensor:
        block_size = self._shape.block_size
        slots = new_slots(self._metadata, block_size)
        return self._tensor(
            self._rows((slots // block_size)[:, None], (slots % block_size)[:, None])
        )

    def _gather(
        self, seqs: slice, first: NDArray[np.int64], num_keys: int
    ) -> tuple[Tensor, NDArray[np.int64]]:
        """Rows of `num_keys` keys from position `first` [B] on, the last one repeated as padding;
        and the position behind each, [B, num_keys], unclipped."""
        meta, block_size = self._metadata, self._shape.block_size
        wanted = first[:, None] + np.arange(num_keys)
        position = np.minimum(wanted, meta.seq_lens[seqs, None] - 1)
        blocks = np.take_along_axis(meta.block_tables[seqs], position // block_size, axis=1)
        return self._tensor(self._rows(blocks, position % block_size)), wanted

    def _plan_singles(self) -> list[_Segment]:
        """Group the sequences with one query, whose lengths descend."""
        meta, shape = self._metadata, self._shape
        visible = meta.seq_lens[: meta.num_single]
        if self._window is not None:
            visible = np.minimum(visible, self._window)
        row_bytes = shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
        segments, start = [], 0
        while start < meta.num_single:
            num_keys = int(visible[start])
            size = max(1, GATHER_BYTES // (row_bytes * num_keys))
            seqs = slice(start, min(start + size, meta.num_single))
            ends = meta.seq_lens[seqs]
            gather, wanted = self._gather(seqs, ends - visible[seqs], num_keys)
            hidden = wanted >= ends[:, None]
            mask = self._mask(hidden[:, None, :]) if hidden.any() else None
            tile = _Tile(0, 1, 0, num_keys, mask)
            segments.append(_Segment(start, seqs.stop - start, 1, gather, num_keys, (tile,)))
            start = seqs.stop
        return segments

    def _plan_chunks(self) -> list[_Segment]:
        meta = self._metadata
        segments, row = [], meta.num_single
        for seq in range(meta.num_single, len(meta.query_lens)):
            num_queries, end = int(meta.query_lens[seq]), int(meta.seq_lens[seq])
            start = end - num_queries
            first = 0 if self._window is None else max(0, start - self._window + 1)
            gather, _ = self._gather(slice(seq, seq + 1), np.array([first]), end - first)
            tiles = self._plan_tiles(num_queries, start - first)
            segments.append(_Segment(row, 1, num_queries, gather, end - first, tiles))
            row += num_queries
        return segments

    def _plan_tiles(self, num_queries: int, before: int) -> tuple[_Tile, ...]:
        """Tiles of one chunk; `before` gathered keys precede its first query."""
        fitting = MAX_SCORES // (self._shape.num_heads * (before + num_queries))
        step = min(QUERY_TILE, max(MIN_QUERY_TILE, fitting))
        tiles = []
        for start in range(0, num_queries, step):
            stop = min(start + step, num_queries)
            query = np.arange(before + start, before + stop)[:, None]
            if self._window is None:
                key_start, masked_from = 0, before + start
            else:
                key_start = masked_from = max(0, before + start - self._window + 1)
            key = np.arange(masked_from, before + stop)
            hidden = key > query
            if self._window is not None:
                hidden |= key <= query - self._window
            mask = self._mask(hidden[None])
            tiles.append(_Tile(start, stop, key_start, before + stop, mask))
        return tuple(tiles)

    def _mask(self, hidden: NDArray[np.bool_]) -> Tensor:
        """[B, queries, m] -> [B, 1, 1, queries, m] on the device."""
        return torch.from_numpy(hidden[:, None, None]).to(self._shape.device)
