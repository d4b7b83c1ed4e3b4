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
from engine.protocol import SamplingParams
from engine.schedule import ScheduledSequence, SchedulerOutput
from engine.sequence import Sequence

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A place in the batch whose next token is wanted. A sequence has one, and one more behind each
    draft that is to be verified."""

    seq: Sequence
    num_output_tokens: int
    """Of `seq`, before the token that is sampled here."""
    drafts: list[int]
    """Taken for granted here: they come between the known tokens and the one sampled."""

    @property
    def sampling(self) -> SamplingParams:
        return self.seq.sampling

    @property
    def seed(self) -> int:
        return self.seq.seed

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.seq.prompt_token_ids)

    @property
    def token_ids(self) -> list[int]:
        return self.seq.token_ids + self.drafts


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: Tensor
    """int64 [T]; those of `unknown` are not filled in"""
    positions: Tensor
    """int64 [T], from 0 at each sequence's first prompt token"""
    attention: AttentionMetadata
    sampling_rows: Tensor
    """int64 [S] into the T tokens"""
    rows: list[SampleRow]
    """S of them, in the order of `sampling_rows`; those of one sequence lie side by side"""
    unknown: list[tuple[int, Key]]
    """Index into the T tokens, and whose token it is that the step before samples"""
    adapters: list[tuple[str, int]]
    """Adapter of each sequence, "" for none, and how many of the T tokens are its"""


def build_batch(output: SchedulerOutput, *, block_size: int, device: torch.device) -> Batch:
    """`output` must schedule something, and the block tables must cover it."""
    entries = sorted(output.scheduled, key=_batch_order)
    query_lens = np.array([entry.num_new_tokens for entry in entries])
    seq_lens = np.array([entry.start + entry.num_new_tokens for entry in entries])
    ends = np.cumsum(query_lens)
    positions = np.arange(ends[-1]) + np.repeat(seq_lens - ends, query_lens)
    tables = np.zeros((len(entries), -(-int(seq_lens.max()) // block_size)), np.int64)
    token_ids: list[int] = []
    unknown: list[tuple[int, Key]] = []
    wanted: list[int] = []
    rows: list[SampleRow] = []
    for entry, row, end in zip(entries, tables, ends.tolist(), strict=True):
        seq, drafts = entry.seq, entry.draft_token_ids
        row[: len(seq.block_table)] = seq.block_table
        token_ids += seq.tokens(entry.start, entry.start + entry.num_new_tokens - len(drafts))
        token_ids += drafts
        if len(token_ids) < end:  # pending: at most one, and the last
            unknown.append((end - 1, (seq.request_id, seq.index)))
            token_ids.append(0)
        if entry.samples:
            wanted += range(end - 1 - len(drafts), end)
            rows += [
                SampleRow(seq, entry.output_index + ahead, drafts[:ahead])
                for ahead in range(len(drafts) + 1)
            ]
    return Batch(
        token_ids=torch.tensor(token_ids, device=device),
        positions=torch.from_numpy(positions).to(device),
        attention=AttentionMetadata(query_lens, seq_lens, tables, int((query_lens == 1).sum())),
        sampling_rows=torch.tensor(wanted, dtype=torch.int64, device=device),
        rows=rows,
        unknown=unknown,
        adapters=[(entry.seq.adapter, entry.num_new_tokens) for entry in entries],
    )


def _batch_order(entry: ScheduledSequence) -> tuple[bool, int]:
    return entry.num_new_tokens > 1, -(entry.start + entry.num_new_tokens)
