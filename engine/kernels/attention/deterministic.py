"""Attention in which a token's bits depend on its own sequence alone, by the plainest means.

Knows no layers.

    out[i] = sum_j softmax_j(scale <q[i], k[j]>) v[j],  summed up in spans of SPAN keys, in order

Libraries choose an order of sums by the shape of a product, so every product here has one shape:
the heads of one token against one span. Spans begin at multiples of SPAN from the sequence's start,
whatever a step computes of it; keys that a token does not see weigh 0. That costs some fifty
microseconds for every token and span: this is for being right, the kernels are for being fast.
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

SPAN = 256
LOWEST = -1e30
"""Below any score, and a number: what was not seen yet weighs 0 beside it, and not NaN."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Keys [start, start + SPAN) of a sequence against the tokens that see any of them."""

    rows: Tensor
    """int64 [num_kv_heads * SPAN] of the cache viewed as [-1, head_dim]; where the sequence owns
    none, another of its rows: 0 * NaN is NaN."""
    tokens: range
    hidden: Tensor
    """bool [len(tokens), SPAN]"""


class FixedAttentionPlan:
    """An `AttentionPlan`."""

    def __init__(
        self, metadata: AttentionMetadata, shape: AttentionShape, window: int | None
    ) -> None:
        self._shape = shape
        self._window = window
        slots = new_slots(metadata, shape.block_size)
        self.slots = torch.from_numpy(slots)
        self._write_rows = self._rows(slots[:, None])
        self._spans: list[_Span] = []
        token = 0
        for seq, (count, total) in enumerate(
            zip(metadata.query_lens.tolist(), metadata.seq_lens.tolist(), strict=True)
        ):
            self._spans += self._plan_sequence(metadata.block_tables[seq], token, count, total)
            token += count

    def write(self, k: Tensor, v: Tensor, cache: KVLayer) -> None:
        """See `AttentionPlan.write`."""
        store_rows(k, cache.k, cache.k_scale, self._write_rows)
        store_rows(v, cache.v, cache.v_scale, self._write_rows)

    def attend(self, q: Tensor, cache: KVLayer) -> Tensor:
        """See `AttentionPlan.attend`. Computed in float32, rounded once."""
        shape = self._shape
        split = (len(q), shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, -1)
        queries = [one.float() * shape.head_dim**-0.5 for one in q.reshape(split)]
        highest = [one.new_full((*one.shape[:2], 1), LOWEST) for one in queries]
        totals = [torch.zeros_like(one) for one in highest]
        mixed = [torch.zeros_like(one) for one in queries]
        for span in self._spans:
            k = self._gathered(cache.k, cache.k_scale, span)
            v = self._gathered(cache.v, cache.v_scale, span)
            for token, hidden in zip(span.tokens, span.hidden, strict=True):
                scores = torch.bmm(queries[token], k.transpose(1, 2))
                scores.masked_fill_(hidden, float("-inf"))
                higher = torch.maximum(highest[token], scores.amax(-1, keepdim=True))
                kept = torch.exp(highest[token] - higher)
                weights = torch.exp(scores - higher)
                totals[token] = totals[token] * kept + weights.sum(-1, keepdim=True)
                mixed[token] = mixed[token] * kept + torch.bmm(weights, v)
                highest[token] = higher
        out = [(one / total).flatten() for one, total in zip(mixed, totals, strict=True)]
        return torch.stack(out).to(q.dtype)

    def _plan_sequence(
        self, table: NDArray[np.int64], token: int, count: int, total: int
    ) -> list[_Span]:
        """table: of its blocks. Its new tokens, from `token` on, are the last `count`."""
        position = np.arange(total - count, total)
        low = np.zeros_like(position)
        if self._window is not None:
            low = np.maximum(position - self._window + 1, 0)
        size, spans = self._shape.block_size, []
        for start in range(int(low[0]) // SPAN * SPAN, total, SPAN):
            seeing = np.flatnonzero((position >= start) & (low < start + SPAN))
            first, stop = int(seeing[0]), int(seeing[-1]) + 1
            key = np.arange(start, start + SPAN)
            owned = np.clip(key, low[0], total - 1)
            rows = self._rows(table[owned // size] * size + owned % size)
            hidden = (key > position[first:stop, None]) | (key < low[first:stop, None])
            tokens = range(token + first, token + stop)
            spans.append(_Span(rows, tokens, torch.from_numpy(hidden)))
        return spans

    def _rows(self, slots: NDArray[np.int64]) -> Tensor:
        """Cache rows of slots [..., n] for every KV head: [... * kv_heads * n]."""
        size, kv_heads = self._shape.block_size, self._shape.num_kv_heads
        first = slots // size * (kv_heads * size) + slots % size
        rows = first[..., None, :] + np.arange(kv_heads)[:, None] * size
        return torch.from_numpy(rows.reshape(-1))

    def _gathered(self, stored: Tensor, scale: Tensor | None, span: _Span) -> Tensor:
        """A span's keys or values, float32 [kv_heads, SPAN, head_dim]."""
        shape = self._shape
        flat, size = stored.view(-1, shape.head_dim), (shape.num_kv_heads, SPAN, shape.head_dim)
        if scale is None:
            return flat.index_select(0, span.rows).float().view(size)
        # Copying by index is defined for bytes, not for float8.
        raw = flat.view(torch.uint8).index_select(0, span.rows).view(stored.dtype)
        return raw.float().view(size) * scale[:, None, None]
