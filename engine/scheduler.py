"""Who runs next: one token budget a step, shared by decodes and chunks of prompts.

Above: `core.py` calls schedule(), runs the model on the output, hands the sampled ids to update().
Below: `prefix_cache.py` owns the blocks. Knows no tensors, no tenants, no sockets; time is a clock
that is passed in.
"""

from __future__ import annotations

import msgspec

from engine.sequence import Sequence


class ScheduledSequence(msgspec.Struct, frozen=True, gc=False):
    """Compute positions [start, start + num_new_tokens) of `seq`; its block table covers them."""

    seq: Sequence
    num_new_tokens: int
    start: int
    """`seq.num_computed_tokens` at the time of schedule()."""
    samples: bool
    """These tokens catch up with all known ones: the step samples the next token of `seq`."""


class SchedulerOutput(msgspec.Struct, frozen=True):
    """One step's work."""

    scheduled: list[ScheduledSequence]
    """Decodes (one new token that samples) first, then chunks of prompts. Each sequence once."""
    preempted: list[Sequence]
    """Lost their blocks in this schedule(); WAITING again."""
    num_tokens: int
    """Sum of num_new_tokens, <= max_num_batched_tokens."""
