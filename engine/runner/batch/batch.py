"""The tensors of one step.

The tokens of all scheduled sequences lie flat behind each other: first the sequences with one new
token, longest first, then the chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.attention.types import AttentionMetadata
from engine.protocol import SamplingParams
from engine.scheduling.step_plan import ScheduledSequence, SchedulerOutput
from engine.sequence import Key, Sequence


class SampleRow(msgspec.Struct, frozen=True, gc=False):
    """A place in the batch whose next token is wanted. A sequence has one, and one more behind each
    draft that is to be verified."""

    seq: Sequence
    num_output_tokens: int
    """The output tokens of `seq` before the token that is sampled here."""
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
class PooledSpan:
    """Tokens of the batch whose hidden states go into an embedding."""

    seq: Sequence
    start: int
    stop: int
    """Into the T tokens."""
    begins: bool
    """No step had any of the sequence's before."""
    completes: bool
    num_pooled: int
    """Tokens that go into the embedding, those of other steps included."""


@dataclass(frozen=True, slots=True)
class ScoredSpan:
    """Tokens of the batch whose logits tell of the tokens behind them in a prompt."""

    seq: Sequence
    start: int
    """Into the T tokens."""
    next_ids: list[int]
    """Those behind them, one each."""


@dataclass(frozen=True, slots=True)
class StepParts:
    """A step as the host knows it, its sequences in the order of the batch."""

    entries: list[ScheduledSequence]
    query_lens: NDArray[np.int64]
    seq_lens: NDArray[np.int64]
    num_single: int
    """Leading sequences with at most the queries that count as single."""
    positions: NDArray[np.int64]
    """[T], from 0 at each sequence's first prompt token"""
    token_ids: list[int]
    """T of them; those of `unknown` are not filled in"""
    unknown: list[tuple[int, Key]]
    """Index into the sequences, whose last of the T tokens the step before samples; and whose"""
    sampling_rows: list[int]
    """S of them, into the T tokens"""
    rows: list[SampleRow]
    """S of them, alike; those of one sequence lie side by side"""
    pooled: list[PooledSpan]
    scored: list[ScoredSpan]

    @property
    def adapters(self) -> list[tuple[str, int]]:
        """Adapter of each sequence, "" for none, and how many of the T tokens are its."""
        return [(entry.seq.adapter, entry.num_new_tokens) for entry in self.entries]


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: Tensor
    """int64 [T]; those of `unknown` are not filled in"""
    positions: Tensor
    """int64 [T]"""
    attention: AttentionMetadata
    sampling_rows: Tensor | None
    """int64 [S] into the T tokens; None: all of them"""
    rows: list[SampleRow]
    unknown: list[tuple[int, Key]]
    """Index into the T tokens, and whose token it is that the step before samples"""
    adapters: list[tuple[str, int]]
    pooled: list[PooledSpan]
    scored: list[ScoredSpan]


_end = attrgetter("end")


def lay_out(output: SchedulerOutput, max_verified: int = 1) -> StepParts:
    """`output` must schedule something. max_verified: a decode with drafts counts as single up to
    so many tokens."""
    singles: list[ScheduledSequence] = []
    chunks: list[ScheduledSequence] = []
    for entry in output.scheduled:
        is_single = entry.num_new_tokens <= (max_verified if entry.decodes else 1)
        (singles if is_single else chunks).append(entry)
    singles.sort(key=_end, reverse=True)
    chunks.sort(key=_end, reverse=True)
    entries = singles + chunks
    end = 0
    token_ids: list[int] = []
    positions: list[int] = []
    unknown: list[tuple[int, Key]] = []
    wanted: list[int] = []
    rows: list[SampleRow] = []
    pooled: list[PooledSpan] = []
    scored: list[ScoredSpan] = []
    for number, entry in enumerate(entries):
        seq, drafts = entry.seq, entry.draft_token_ids
        positions += range(entry.start, entry.end)
        token_ids += seq.tokens(entry.start, entry.end - len(drafts))
        token_ids += drafts
        end += entry.num_new_tokens
        if len(token_ids) < end:  # pending: at most one, and the last
            unknown.append((number, seq.key))
            token_ids.append(0)
        if entry.samples:
            wanted += range(end - 1 - len(drafts), end)
            rows.append(SampleRow(seq, entry.output_index, []))
            rows += [
                SampleRow(seq, entry.output_index + ahead, drafts[:ahead])
                for ahead in range(1, len(drafts) + 1)
            ]
        if entry.num_scored:
            first = entry.start + 1
            next_ids = seq.prompt_token_ids[first : first + entry.num_scored]
            scored.append(ScoredSpan(seq, end - entry.num_new_tokens, next_ids))
        if seq.pooling == "mean":
            span = (end - entry.num_new_tokens, end, entry.start == 0, entry.embeds)
            pooled.append(PooledSpan(seq, *span, num_pooled=seq.num_tokens))
        elif entry.embeds:
            pooled.append(PooledSpan(seq, end - 1, end, True, True, num_pooled=1))
    return StepParts(
        entries=entries,
        query_lens=np.array([entry.num_new_tokens for entry in entries]),
        seq_lens=np.array([entry.end for entry in entries]),
        num_single=len(singles),
        positions=np.array(positions),
        token_ids=token_ids,
        unknown=unknown,
        sampling_rows=wanted,
        rows=rows,
        pooled=pooled,
        scored=scored,
    )


def build_batch(output: SchedulerOutput, *, block_size: int, device: torch.device) -> Batch:
    """`output` must schedule something, and the block tables must cover it."""
    parts = lay_out(output)
    longest = max(entry.end for entry in parts.entries)
    tables = np.zeros((len(parts.entries), -(-longest // block_size)), np.int64)
    for entry, row in zip(parts.entries, tables, strict=True):
        table = entry.seq.block_table[: len(row)]
        row[: len(table)] = table
    ends = np.cumsum(parts.query_lens) if parts.unknown else ()
    rows = None
    if len(parts.sampling_rows) < len(parts.token_ids):
        rows = torch.from_numpy(np.array(parts.sampling_rows, np.int64)).to(device)
    return Batch(
        token_ids=torch.from_numpy(np.array(parts.token_ids)).to(device),
        positions=torch.from_numpy(parts.positions).to(device),
        attention=AttentionMetadata(parts.query_lens, parts.seq_lens, tables, parts.num_single),
        sampling_rows=rows,
        rows=parts.rows,
        unknown=[(int(ends[number]) - 1, key) for number, key in parts.unknown],
        adapters=parts.adapters,
        pooled=parts.pooled,
        scored=parts.scored,
    )
