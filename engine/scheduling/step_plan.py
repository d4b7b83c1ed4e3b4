"""One step's work: what the scheduler hands out and gets back, and the plan while it is filled.

Knows no queues and no blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from engine.protocol import Lane, TokenLogprobs
from engine.sequence import Key, SampledTokens, Sequence, SequenceStatus

Sampled = Mapping[Key, SampledTokens]
"""(request_id, index) -> what the step sampled for that choice."""
Embedded = Mapping[Key, bytes]
"""The same of embeddings that the step completed, as in `EngineOutput.embedding`."""
Scored = Mapping[Key, list[TokenLogprobs]]
"""The same of the prompts' tokens of which the step tells."""
NOTHING: Mapping[Key, Any] = {}


class ScheduledSequence(msgspec.Struct, frozen=True, gc=False):
    """Compute positions [start, start + num_new_tokens) of `seq`; its block table covers them."""

    seq: Sequence
    num_new_tokens: int
    start: int
    """Tokens of `seq` computed by this step's predecessors."""
    samples: bool
    """These tokens catch up with all known ones: the step samples the next token of `seq`."""
    output_index: int
    """How many output tokens come before the (first) one that this step samples."""
    attempt: int
    """`seq.num_preemptions` at the time of schedule(): a preemption voids the entry."""
    draft_token_ids: list[int] = []
    """The last of the new tokens, which are guesses: the step samples behind each, too."""
    embeds: bool = False
    """These tokens catch up with the prompt of an embedding, which the step completes."""
    num_scored: int = 0
    """The first of the new tokens, each of which tells of the one behind it in the prompt."""

    @property
    def end(self) -> int:
        return self.start + self.num_new_tokens

    @property
    def answers(self) -> bool:
        """The step's end says something of `seq`."""
        return self.samples or self.embeds

    @property
    def key(self) -> Key:
        return self.seq.key

    @property
    def decodes(self) -> bool:
        """One known token, and drafts behind it."""
        return self.samples and self.num_new_tokens == 1 + len(self.draft_token_ids)

    def stands(self) -> bool:
        """Whether what the step computed is still wanted: the sequence has not ended since, nor
        was it preempted."""
        seq = self.seq
        return seq.status is SequenceStatus.RUNNING and seq.num_preemptions == self.attempt


class SchedulerOutput(msgspec.Struct, frozen=True):
    """One step's work."""

    scheduled: list[ScheduledSequence]
    """Those that lacked one token first, then chunks of prompts. Each sequence once."""
    preempted: list[Sequence]
    """Lost their blocks in this schedule(); WAITING again."""
    num_tokens: int
    """Sum of num_new_tokens, <= max_num_batched_tokens."""
    started_s: float = 0.0
    """When it was scheduled, if `prompt_tokens` says anything."""
    prompt_tokens: dict[Lane, int] = {}
    """Computed of prompts, in lanes of which some prompts have to wait."""

    @property
    def num_long_tokens(self) -> int:
        """In chunks of long prompts."""
        return sum(
            entry.num_new_tokens
            for entry in self.scheduled
            if not entry.decodes and entry.seq.is_long
        )


def check_computed(
    output: SchedulerOutput, sampled: Sampled, embedded: Embedded, scored: Scored
) -> None:
    """AssertionError unless a step has computed what it was to compute."""
    _check_keys("sampled", sampled, [e.seq.key for e in output.scheduled if e.samples])
    _check_keys("embedded", embedded, [e.seq.key for e in output.scheduled if e.embeds])
    _check_keys("scored", scored, [e.seq.key for e in output.scheduled if e.num_scored])


def _check_keys(what: str, found: Collection[Key], wanted: list[Key]) -> None:
    """wanted: each once."""
    same = len(found) == len(wanted) and all(map(found.__contains__, wanted))
    assert same, f"{what} {set(found) ^ set(wanted)} against the schedule"


class StepPlan:
    """A step's batch while schedule() fills it."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_tokens = 0
        self.scheduled: dict[tuple[int, int], ScheduledSequence] = {}
        self.preempted: list[Sequence] = []
        self.long_budget = budget
        """The part of `budget` for long prompts."""
        self.pressed: dict[Lane, int] = {}
        """Becomes `SchedulerOutput.prompt_tokens`."""

    def put(self, seq: Sequence, num_new_tokens: int, drafts: list[int] | None = None) -> None:
        drafts = drafts or []
        catches_up = num_new_tokens == seq.num_missing
        num_tokens = num_new_tokens + len(drafts)
        embeds = seq.pooling is not None
        start = seq.num_computed_tokens + seq.num_in_flight
        self.scheduled[seq.order] = ScheduledSequence(
            seq,
            num_tokens,
            start=start,
            samples=catches_up and not embeds,
            output_index=len(seq.output_token_ids) + seq.num_pending,
            attempt=seq.num_preemptions,
            draft_token_ids=drafts,
            embeds=catches_up and embeds,
            num_scored=seq.num_scored(start, start + num_new_tokens),
        )
        self._spend(num_tokens)

    def num_tokens_of(self, lane: Lane) -> int:
        scheduled = self.scheduled.values()
        return sum(entry.num_new_tokens for entry in scheduled if entry.seq.lane == lane)

    def take_back(self, seq: Sequence) -> None:
        """`seq` was preempted, perhaps after it was put."""
        self.preempted.append(seq)
        self.remove(seq)

    def remove(self, seq: Sequence) -> None:
        entry = self.scheduled.pop(seq.order, None)
        if entry is not None:
            self._spend(-entry.num_new_tokens)

    def _spend(self, num_tokens: int) -> None:
        self.budget -= num_tokens
        self.num_tokens += num_tokens
