"""One step's attention by Triton kernels: the plan that `dispatch` chooses for a GPU.

Knows no weights and no requests. Never waits for the device.

Deterministic, both kernels use one shape of tile and one order of sums, so that a token's bits do
not tell whether it was decoded, prefilled with its prompt or recomputed after a preemption.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from engine.kernels.attention import triton_decode as decode
from engine.kernels.attention import triton_prefill as prefill
from engine.kernels.attention.types import AttentionShape, DeviceMetadata, KVLayer, store_rows

MAX_DECODE_ROWS = 128
"""Queries times heads of a group in one tile; more are prefilled."""
INTERPRETED_UNITS = 8
"""Multiprocessors that the interpreter stands for: few, for each program costs it a millisecond."""


class TritonAttentionPlan:
    """`AttentionPlan` of one step and window."""

    def __init__(
        self,
        metadata: DeviceMetadata,
        shape: AttentionShape,
        window: int | None,
        *,
        out: Tensor | None = None,
        sums: Tensor | None = None,
    ) -> None:
        """out: [at least T, num_heads * head_dim], written by every attend(); None: fresh memory.
        sums: float32, at least `sums_needed`; None: fresh memory once a plan."""
        self._metadata = metadata
        self._shape = shape
        self._window = window
        self._out = out
        self._scale_log2 = math.log2(math.e) * float(shape.head_dim) ** -0.5
        self._group = shape.num_heads // shape.num_kv_heads
        self._prefill = prefill.prefill_config(
            self._group, shape.head_dim, metadata.max_query_len, deterministic=shape.deterministic
        )
        rows = metadata.max_single_query_len * self._group
        fits = rows <= (self._prefill.block_m if shape.deterministic else MAX_DECODE_ROWS)
        self._num_decodes = metadata.num_single if fits else 0
        self._sums = sums
        if self._num_decodes:
            self._decode = self._decode_config()
            assert sums is None or sums.numel() >= self.sums_needed

    @property
    def slots(self) -> Tensor:
        return self._metadata.slots

    @property
    def num_splits(self) -> int:
        """Programs that there are for each decoded sequence and KV head, whether or not its keys
        are enough for all of them. More of them where `max_seq_len` is larger."""
        return self._decode.num_splits if self._num_decodes else 1

    @property
    def sums_needed(self) -> int:
        """float32 numbers that stand between the kernels of one attend(), of any layer."""
        if not self._num_decodes:
            return 0
        rows = self._num_decodes * self._metadata.max_single_query_len
        shape = self._shape
        return decode.sums_size(rows, shape.num_heads, shape.head_dim, self._decode.num_splits)

    def write(self, k: Tensor, v: Tensor, cache: KVLayer) -> None:
        """Without rotation and without padding; layers write through `rotary_cache`."""
        shape = self._shape
        block, offset = self.slots // shape.block_size, self.slots % shape.block_size
        first = block * (shape.num_kv_heads * shape.block_size) + offset
        heads = torch.arange(shape.num_kv_heads, device=first.device) * shape.block_size
        rows = (first[:, None] + heads).view(-1)
        store_rows(k, cache.k, cache.k_scale, rows)
        store_rows(v, cache.v, cache.v_scale, rows)

    def attend(self, q: Tensor, cache: KVLayer) -> Tensor:
        meta, shape = self._metadata, self._shape
        if self._out is None:
            out = q.new_empty(q.shape[0], shape.num_heads * shape.head_dim)
        else:
            out = self._out[: q.shape[0]]
        stored = (cache.k, cache.v, cache.k_scale, cache.v_scale)
        step = (meta.query_start, meta.seq_lens, meta.block_tables)
        if self._num_decodes:
            if self._sums is None:
                size = self.sums_needed
                self._sums = torch.empty(size, dtype=torch.float32, device=shape.device)
            decode.launch_decode(
                out,
                q,
                stored,
                *step,
                self._sums,
                scale_log2=self._scale_log2,
                num_seqs=self._num_decodes,
                max_queries=meta.max_single_query_len,
                window=self._window,
                config=self._decode,
            )
        if meta.seq_lens.shape[0] > self._num_decodes:
            prefill.launch_prefill(
                out,
                q,
                stored,
                *step,
                scale_log2=self._scale_log2,
                first_seq=self._num_decodes,
                max_tokens=q.shape[0],
                window=self._window,
                config=self._prefill,
            )
        return out

    def _decode_config(self) -> decode.DecodeConfig:
        meta, shape = self._metadata, self._shape
        return decode.decode_config(
            self._group,
            shape.head_dim,
            num_seqs=self._num_decodes,
            num_kv_heads=shape.num_kv_heads,
            max_queries=meta.max_single_query_len,
            max_seq_len=meta.max_seq_len,
            window=self._window,
            num_units=_num_units(shape.device),
            deterministic=shape.deterministic,
        )


@cache
def _num_units(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_UNITS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
