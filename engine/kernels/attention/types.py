"""The data of one step's causal attention over a paged KV cache, and what every plan does alike.

Layout: a layer's keys (and values) are [num_blocks, num_kv_heads, block_size, head_dim], so that a
block of a layer is contiguous memory and a (block, head, offset) triple is one row of head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class KVScales(NamedTuple):
    """The scales of one layer's float8 cache, float32 [num_kv_heads]: a key is what is stored times
    `k`.
    """

    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer's cache; both [num_blocks, num_kv_heads, block_size, head_dim]."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    """float32 [num_kv_heads]: a key is what is stored times this. Given where k is float8."""
    v_scale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes and types that every layer of a model shares. Heads are those of this rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    cache_dtype: torch.dtype | None = None
    """The dtype of stored keys and values; None: `dtype`. float8_e4m3fn goes with scales in
    `KVLayer`."""
    deterministic: bool = False
    """A query's bits depend neither on the batch nor on how its prompt was cut."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's sequences in the order of the batch: first those with one query, longest first."""

    query_lens: NDArray[np.int64]
    """[S] new tokens of each sequence; their keys are written by this step."""
    seq_lens: NDArray[np.int64]
    """[S] tokens of each sequence, the new ones included."""
    block_tables: NDArray[np.int64]
    """[S, max_blocks]; entries outside the sliding window or past the end are never read."""
    num_single: int
    """Leading sequences whose query_len is 1."""


@dataclass(frozen=True, slots=True)
class DeviceMetadata:
    """The same step as tensors on the device. Sizes that change are read there, so that a step can
    be captured in a CUDA graph and replayed; the integers are upper bounds, except num_single.
    """

    query_start: Tensor
    """int32 [S + 1]: first token of each sequence, and their total."""
    seq_lens: Tensor
    """int32 [S]; 0 for padding, which has no queries."""
    block_tables: Tensor
    """int32 [S, max_blocks]"""
    slots: Tensor
    """int64 [T]: block * block_size + offset of each new token; -1 where none is kept."""
    num_single: int
    """Leading sequences of at most `max_single_query_len` queries."""
    max_query_len: int
    max_seq_len: int
    max_single_query_len: int = 1
    """Above 1 where proposed tokens are verified."""


class AttentionPlan(Protocol):
    """Attention of one step under one window, ready for every layer that uses this window."""

    @property
    def slots(self) -> Tensor:
        """int64 [T]: block * block_size + offset of each token's keys; -1 where none are kept."""

    def write(self, k: Tensor, v: Tensor, cache: KVLayer) -> None:
        """Store this step's keys and values, [T, num_kv_heads, head_dim] each."""

    def attend(self, q: Tensor, cache: KVLayer) -> Tensor:
        """[T, num_heads, head_dim] -> [T, num_heads * head_dim]; call write() before."""


def new_slots(metadata: AttentionMetadata, block_size: int) -> NDArray[np.int64]:
    """[T] block * block_size + offset of each new token."""
    lens, tables = metadata.query_lens, metadata.block_tables
    seq = np.repeat(np.arange(len(lens)), lens)
    ends = np.cumsum(lens)
    position = np.arange(ends[-1]) + np.repeat(metadata.seq_lens - ends, lens)
    return tables[seq, position // block_size] * block_size + position % block_size


def to_device(metadata: AttentionMetadata, shape: AttentionShape) -> DeviceMetadata:
    """The step as the kernels read it."""

    def tensor(array: NDArray[np.int64], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(array).to(dtype).to(shape.device)

    starts = np.concatenate([[0], np.cumsum(metadata.query_lens)])
    return DeviceMetadata(
        query_start=tensor(starts, torch.int32),
        seq_lens=tensor(metadata.seq_lens, torch.int32),
        block_tables=tensor(metadata.block_tables, torch.int32),
        slots=tensor(new_slots(metadata, shape.block_size), torch.int64),
        num_single=metadata.num_single,
        max_query_len=int(metadata.query_lens.max()),
        max_seq_len=int(metadata.seq_lens.max()),
    )


def store_rows(new: Tensor, stored: Tensor, scale: Tensor | None, rows: Tensor) -> None:
    """Write `new` [T, num_kv_heads, head_dim] to rows [T * num_kv_heads] of the cache `stored`,
    divided by `scale` [num_kv_heads] and rounded where the cache is float8."""
    flat = stored.view(-1, stored.shape[-1])
    if scale is not None:
        limit = torch.finfo(stored.dtype).max
        new = (new.float() / scale[:, None]).clamp(-limit, limit).to(stored.dtype)
        # Copying by index is defined for bytes, not for float8.
        new, flat = new.view(torch.uint8), flat.view(torch.uint8)
    flat.index_copy_(0, rows, new.reshape(-1, new.shape[-1]))
