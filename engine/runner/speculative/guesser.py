"""Speculative decoding: guess what follows, verify the guesses in one step, keep what was right.

Knows sequences, no tensors and no queue.

A guess is one token, not a distribution: a point mass. Rejection sampling (Leviathan et al. 2023,
arXiv:2211.17192) then is to draw x from the model's own distribution p and to accept the guess d
when x = d: d is said with probability p(d), any other x with p(x). So nothing is lost, and since
the draw depends on seed and position alone, the text is the one that would have come without.

Verifying costs time. `Worth` measures it, and stops guessing for a request whose guesses are so
rarely right that plain steps would be faster.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.scheduling.step_plan import Sampled, ScheduledSequence, SchedulerOutput
from engine.sequence import Key, Sequence

LONGEST_NGRAM, SHORTEST_NGRAM = 4, 2
WEIGHT = 0.2
"""The weight of the newest step in the running averages."""
PLAIN_EVERY = 64
"""At most so many verifying steps between two that only decode."""
TRIAL_STEPS = 6
"""So many verified guesses before a request is judged."""
RETRY_TOKENS = 64
"""A request that was given up is tried again after so many tokens: texts change."""


class Proposer(Protocol):
    """A source of guesses."""

    def keep_only(self, seqs: Iterable[Sequence]) -> None:
        """A step begins: forget all others."""

    def propose(self, seq: Sequence) -> list[int]:
        """Return what may follow; or placeholders, as many as blocks are to be had for."""

    def fill(self, output: SchedulerOutput, room: int) -> bool:
        """Replace placeholders in the entries of the step. `room`: tokens that may be computed
        beside it. Whether the step's time says nothing of usual ones."""


class Guesser:
    """Puts guesses where they are worth it, and learns what they were worth."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self._worth = Worth()
        self.num_guessed = self.num_right = 0

    def guess(self, running: list[Sequence]) -> None:
        """Set `draft_token_ids` of those whose next step could verify some."""
        self._proposer.keep_only(running)
        self._worth.keep_only(running)
        if self._worth.wants_plain_step(sum(seq.num_missing == 1 for seq in running)):
            return
        for seq in running:
            # The last token of all is never guessed: nothing is verified behind it.
            ends = seq.num_output_tokens + 1 >= seq.sampling.max_tokens
            if seq.num_missing == 1 and not ends and self._worth.is_worth_it(seq):
                seq.draft_token_ids = self._proposer.propose(seq)

    def fill(self, output: SchedulerOutput, room: int) -> bool:
        """See `Proposer`."""
        return self._proposer.fill(output, room)

    def learn(
        self, decodes: list[ScheduledSequence], sampled: Sampled, step_s: float | None
    ) -> None:
        """A step verified the drafts of `decodes`. step_s: how long it took, if that says what
        verifying costs."""
        verifying = False
        for entry in decodes:
            tokens = sampled.get(entry.key)
            if entry.draft_token_ids and tokens is not None:
                verifying = True
                self.num_guessed += len(entry.draft_token_ids)
                self.num_right += len(tokens) - 1
                self._worth.observe(entry.seq, len(tokens) - 1, len(decodes))
        if decodes and step_s is not None:
            self._worth.observe_step(verifying=verifying, step_s=step_s, num_decodes=len(decodes))


class GrammarProposer:
    """Guesses what a grammar leaves no choice about (jump-forward): the keys of an object, the form
    of a call. Always right, so many tokens come of one step; and elsewhere what another one
    guesses."""

    def __init__(self, num_drafts: int, otherwise: Proposer | None = None) -> None:
        assert num_drafts >= 1
        self._num_drafts = num_drafts
        self._otherwise = otherwise

    def keep_only(self, seqs: Iterable[Sequence]) -> None:
        if self._otherwise is not None:
            self._otherwise.keep_only(seqs)

    def propose(self, seq: Sequence) -> list[int]:
        forced = [] if seq.constraint is None else seq.constraint.forced(seq.output_token_ids)
        if forced or self._otherwise is None:
            return forced[: self._num_drafts]
        return self._otherwise.propose(seq)

    def fill(self, output: SchedulerOutput, room: int) -> bool:
        """Nothing: guesses are there from the start."""
        return False


class NgramProposer:
    """Guesses that what followed the last few tokens before will follow them again: prompt lookup
    (Saxena 2023), which pays where answers quote their prompt."""

    def __init__(self, num_drafts: int) -> None:
        assert num_drafts >= 1
        self._num_drafts = num_drafts
        self._texts: dict[Key, _Text] = {}

    def propose(self, seq: Sequence) -> list[int]:
        """Up to `num_drafts` ids; empty when the last tokens stand nowhere before."""
        text = self._texts.setdefault(seq.key, _Text())
        return text.update(seq).continuation(self._num_drafts)

    def fill(self, output: SchedulerOutput, room: int) -> bool:
        """Nothing: guesses are there from the start."""
        return False

    def keep_only(self, seqs: Iterable[Sequence]) -> None:
        """Forget all others."""
        kept = {seq.key for seq in seqs}
        for key in self._texts.keys() - kept:
            del self._texts[key]


class _Text:
    """A sequence's tokens as an array that grows with it."""

    def __init__(self) -> None:
        self._ids: NDArray[np.int64] = np.empty(0, np.int64)
        self._size = 0

    def update(self, seq: Sequence) -> _Text:
        new = seq.tokens(self._size, seq.num_tokens)
        end = self._size + len(new)
        if end > len(self._ids):
            self._ids = np.concatenate((self._ids[: self._size], np.empty(2 * end, np.int64)))
        self._ids[self._size : end] = new
        self._size = end
        return self

    def continuation(self, count: int) -> list[int]:
        """Return what followed the latest earlier occurrence of the longest n-gram at the end."""
        ids = self._ids[: self._size]
        for length in range(min(LONGEST_NGRAM, self._size - 1), SHORTEST_NGRAM - 1, -1):
            ends = np.flatnonzero(ids[length - 1 : -1] == ids[-1]) + length
            for back in range(2, length + 1):
                ends = ends[ids[ends - back] == ids[-back]]
            if len(ends):
                return [int(token_id) for token_id in ids[ends[-1] : ends[-1] + count]]
        return []


@dataclass(slots=True)
class _Record:
    """How one request's guesses fared."""

    num_verified: int = 0
    accepted: float = 0.0
    """Running average of guesses accepted in a step that verified some."""
    given_up_at: int | None = None
    """Output tokens when its guesses were given up."""


class Worth:
    """Whether to guess for a request. A step that verifies guesses says 1 + accepted tokens instead
    of one, and takes longer by a factor that is measured, too."""

    def __init__(self) -> None:
        self._records: dict[Key, _Record] = {}
        self._plain_s: dict[int, float] = {}
        self._verifying_s: dict[int, float] = {}
        """Seconds of a step of decodes alone, by the bit length of their number."""
        self._num_verifying = 0

    def slowdown(self, num_decodes: int) -> float:
        """Seconds of a verifying step over those of a plain one; 1 until both were seen."""
        bucket = num_decodes.bit_length()
        plain_s, verifying_s = self._plain_s.get(bucket), self._verifying_s.get(bucket)
        if plain_s is None or verifying_s is None:
            return 1.0
        return max(1.0, verifying_s / plain_s)

    def wants_plain_step(self, num_decodes: int) -> bool:
        """Now and then, and where none was seen yet, a step without guesses shows what one
        costs."""
        bucket = num_decodes.bit_length()
        unseen = bucket in self._verifying_s and bucket not in self._plain_s
        return unseen or self._num_verifying >= PLAIN_EVERY

    def is_worth_it(self, seq: Sequence) -> bool:
        record = self._records.setdefault(seq.key, _Record())
        if record.given_up_at is not None:
            if seq.num_output_tokens - record.given_up_at < RETRY_TOKENS:
                return False
            self._records[seq.key] = _Record()
        return True

    def observe(self, seq: Sequence, num_accepted: int, num_decodes: int) -> None:
        """In a step of `num_decodes`, so many guesses for `seq` were right."""
        record = self._records.setdefault(seq.key, _Record())
        record.num_verified += 1
        weight = max(WEIGHT, 1 / record.num_verified)
        record.accepted += weight * (num_accepted - record.accepted)
        if record.num_verified >= TRIAL_STEPS and 1 + record.accepted < self.slowdown(num_decodes):
            record.given_up_at = seq.num_output_tokens

    def observe_step(self, *, verifying: bool, step_s: float, num_decodes: int) -> None:
        """A step of decodes alone took `step_s`."""
        self._num_verifying = self._num_verifying + 1 if verifying else 0
        seconds = self._verifying_s if verifying else self._plain_s
        bucket = num_decodes.bit_length()
        before = seconds.get(bucket, step_s)
        seconds[bucket] = before + WEIGHT * (step_s - before)

    def keep_only(self, seqs: Iterable[Sequence]) -> None:
        """Forget all others."""
        kept = {seq.key for seq in seqs}
        for key in self._records.keys() - kept:
            del self._records[key]
