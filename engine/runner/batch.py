"""The tensors of one step.

Above: `model_runner.py`. Below: numpy and torch. The tokens of all scheduled sequences lie flat
behind each other: first the sequences with one new token, longest first, then the chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.kernels.paged_attention import AttentionMetadata
from engine.schedule import ScheduledSequence, SchedulerOutput
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: Tensor
    """int64 [T]"""
    positions: Tensor
    """int64 [T], from 0 at each sequence's first prompt token"""
    attention: AttentionMetadata
    sampling_rows: Tensor
    """int64 [S] into the T tokens: the last one of each sequence that samples"""
    sampling: list[Sequence]
    """S sequences, in the order of `sampling_rows`"""


def build_batch(output: SchedulerOutput, *, block_size: int, device: torch.device) -> Batch:
    """`output` must schedule something, and the block tables must cover it."""
    entries = sorted(output.scheduled, key=_batch_order)
    query_lens = np.array([entry.num_new_tokens for entry in entries])
    seq_lens = np.array([entry.start + entry.num_new_tokens for entry in entries])
    ends = np.cumsum(query_lens)
    positions = np.arange(ends[-1]) + np.repeat(seq_lens - ends, query_lens)
    token_ids: list[int] = []
    for entry in entries:
        stop = entry.start + entry.num_new_tokens
        token_ids += entry.seq.tokens(entry.start, stop)
    tables = np.zeros((len(entries), -(-int(seq_lens.max()) // block_size)), np.int64)
    for row, entry in zip(tables, entries, strict=True):
        row[: len(entry.seq.block_table)] = entry.seq.block_table
    sampling = [i for i, entry in enumerate(entries) if entry.samples]
    return Batch(
        token_ids=torch.tensor(token_ids, device=device),
        positions=torch.from_numpy(positions).to(device),
        attention=AttentionMetadata(query_lens, seq_lens, tables, int((query_lens == 1).sum())),
        sampling_rows=torch.from_numpy(ends[sampling] - 1).to(device),
        sampling=[entries[i].seq for i in sampling],
    )


def _batch_order(entry: ScheduledSequence) -> tuple[bool, int]:
    return entry.num_new_tokens > 1, -(entry.start + entry.num_new_tokens)
