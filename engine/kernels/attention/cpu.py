"""The attention of one step on a processor: which rows each thread takes, and the calls.

Knows no layers. The cache's memory is that of `KVLayer`, its layout the kernels' own: whoever
writes through this plan attends through it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.kernels.attention.types import AttentionMetadata, AttentionShape, KVLayer
from engine.kernels.choice.microkernel import Microkernel
from engine.kernels.choice.products import PromptShape, uses_library
from engine.kernels.cpu.backend import (
    DTYPES,
    LANES,
    empty,
    float_bits,
    half,
    kernel,
    start,
    uses_cpu_kernels,
)
from engine.kernels.cpu.items import ITEM_WIDTH, LIBRARY_ROWS, ROWS

SPARE_BLOCKS = 2
"""Scores are computed for two blocks at once."""
ATTEND_VARIES = ROTATE_VARIES = 7
"""Among the kernels' arguments: SLOT and COS are the first that belong to the step."""
MIN_TOKENS_A_THREAD = 8
"""A team is not worth calling for fewer tokens to turn."""


def library_for(shape: AttentionShape) -> Microkernel | None:
    """Return whose product multiplies for prompts, where it was measured to be faster than our own
    tiles."""
    if shape.deterministic or shape.dtype != torch.bfloat16:
        return None
    found = uses_library(PromptShape(shape.num_heads, shape.num_kv_heads, shape.head_dim))
    return found[1] if found is not None and found[0][0] else None


def cpu_attends(shape: AttentionShape) -> bool:
    """Whether the kernels serve this shape."""
    return (
        shape.dtype in DTYPES
        and shape.cache_dtype in (None, shape.dtype)
        and shape.block_size == LANES
        and shape.head_dim % (2 * LANES) == 0
        and uses_cpu_kernels(shape.device)
    )


class CpuAttentionPlan:
    """An `AttentionPlan`."""

    def __init__(
        self,
        metadata: AttentionMetadata,
        shape: AttentionShape,
        window: int | None,
        library: Microkernel | None = None,
    ) -> None:
        """library: its product multiplies for prompts; None: our own tiles do."""
        self._shape = shape
        self._half = half(shape.dtype)
        self._attends, self._rotates = f"attend {window}", f"rotate {window}"
        self._threads = torch.get_num_threads()
        self._rows = ROWS if library is None else LIBRARY_ROWS
        self._tables = torch.from_numpy(np.ascontiguousarray(metadata.block_tables))
        self.slots, self._items = self._plan(metadata)
        stride = (self._tables.shape[1] + SPARE_BLOCKS) * LANES * 4
        scratch = shape.head_dim * 4 * (self._rows + 1) + self._rows * stride
        self._scratch = torch.empty(self._threads, scratch, dtype=torch.uint8)
        # What attention's arguments have in them of this step, from ATTEND_VARIES on.
        self._fixed = (
            0,
            self._tables.data_ptr(),
            self._tables.shape[1],
            self._items.data_ptr(),
            len(self._items),
            self._scratch.data_ptr(),
            scratch,
            stride,
            shape.num_kv_heads,
            shape.num_heads // shape.num_kv_heads,
            shape.head_dim,
            window or 0,
            self._half,
            float_bits(shape.head_dim**-0.5),
            *(library or (0, 0)),
        )

    @classmethod
    def measured(
        cls, metadata: AttentionMetadata, shape: AttentionShape, window: int | None
    ) -> CpuAttentionPlan:
        """Return the plan with the product that was measured to be the fastest."""
        return cls(metadata, shape, window, library_for(shape))

    def _plan(self, metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
        """Return where the new tokens' keys go, int64 [T], and what threads draw, [n,
        ITEM_WIDTH].
        """
        shape, tables, num_single = self._shape, self._tables, metadata.num_single
        chunks = metadata.query_lens[num_single:].tolist()
        num_tiles = sum(-(-count // self._rows) for count in chunks)
        num_items = num_single * shape.num_kv_heads + num_tiles * shape.num_heads
        query_lens = torch.from_numpy(metadata.query_lens)
        seq_lens = torch.from_numpy(metadata.seq_lens)
        slots = torch.empty(num_single + sum(chunks), dtype=torch.int64)
        items = torch.empty(num_items, ITEM_WIDTH, dtype=torch.int64)
        start(
            kernel("plan", "plan"),
            (
                query_lens.data_ptr(),
                seq_lens.data_ptr(),
                len(query_lens),
                num_single,
                tables.data_ptr(),
                tables.shape[1],
                slots.data_ptr(),
                items.data_ptr(),
                shape.num_heads,
                shape.num_kv_heads,
                self._rows,
            ),
            1,
        )
        return slots, items

    def varying(self, cos: Tensor, sin: Tensor) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Return this step's `cpu_program.Varying`; called with the angles of its tokens."""
        angles = (cos.data_ptr(), sin.data_ptr(), self.slots.data_ptr())
        return {
            self._attends: (ATTEND_VARIES, self._fixed),
            self._rotates: (ROTATE_VARIES, angles),
        }

    def write(self, k: Tensor, v: Tensor, cache: KVLayer) -> None:
        """See `AttentionPlan.write`: keys that are turned by no angle."""
        num_tokens, num_kv_heads, head_dim = k.shape
        cos = k.new_ones(num_tokens, 1, head_dim)
        sin = k.new_zeros(num_tokens, 1, head_dim // 2)
        self.rotate_and_store(torch.cat((k, v), dim=1).flatten(1), 0, cos, sin, None, cache)

    def rotate_and_store(
        self,
        qkv: Tensor,
        num_heads: int,
        cos: Tensor,
        sin: Tensor,
        norm: tuple[Tensor, Tensor, float] | None,
        cache: KVLayer,
    ) -> Tensor:
        """qkv [T, (num_heads + 2 * num_kv_heads) * head_dim] is turned in place; see
        `rotary_cache.rotate_and_store`. norm: weights for queries and keys, and epsilon."""
        shape, num_tokens = self._shape, len(qkv)
        q_weight, k_weight, eps = norm or (None, None, 0.0)
        start(
            kernel("rotary", "rotate_and_store"),
            (
                0,
                qkv.data_ptr(),
                qkv.stride(0) * qkv.itemsize,
                num_tokens,
                num_heads,
                shape.num_kv_heads,
                shape.head_dim,
                cos.data_ptr(),
                sin.data_ptr(),
                self.slots.data_ptr(),
                cache.k.data_ptr(),
                cache.v.data_ptr(),
                0 if q_weight is None else q_weight.data_ptr(),
                0 if k_weight is None else k_weight.data_ptr(),
                float_bits(eps),
                self._half,
            ),
            min(self._threads, -(-num_tokens // MIN_TOKENS_A_THREAD)),
            self._rotates,
        )
        return qkv.view(num_tokens, -1, shape.head_dim)[:, :num_heads]

    def attend(self, q: Tensor, cache: KVLayer) -> Tensor:
        """See `AttentionPlan.attend`; heads of a token lie side by side."""
        width = self._shape.num_heads * self._shape.head_dim
        out = empty((len(q), width), q.dtype)
        size = out.itemsize
        start(
            kernel("attention", "attend"),
            (
                0,
                q.data_ptr(),
                q.stride(0) * size,
                out.data_ptr(),
                width * size,
                cache.k.data_ptr(),
                cache.v.data_ptr(),
                *self._fixed,
            ),
            min(self._threads, len(self._items)),
            self._attends,
        )
        return out
