"""Guesses drawn from a second, smaller model over the same vocabulary.

Knows sequences and a step's schedule; no queue, no tensor, no adapter: drafts come from the draft
model as it is.

A draft is drawn as the large model's token will be: with the request's own parameters, and with the
uniform number of its seed and position (common random numbers). So the two agree often, and where
they do not, the token said is the large model's own draw: verifying is rejection sampling for a
point mass (Leviathan et al. 2023, arXiv:2211.17192), lossless whatever was drafted.

How: the scheduler reserves blocks for placeholders; before the step they are filled in. A pass over
what the draft model lacks draws the first draft of each sequence, and each further pass, launched a
step ahead and fed on the device, one more. The last draft's own KV is not computed: the next first
pass makes up for it, as for anything else that is missing; or, where decodes are replayed as
graphs, which take one token of each sequence, a pass of its own before that.

What a draft model holds is trusted only where it computed it itself, for this sequence, in blocks
that are still the sequence's: others may have been filled while nobody drafted. A sequence that
lacks much catches up in portions before anything is drafted for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import msgspec

from engine.runner.model_runner import LaunchedStep, ModelRunner
from engine.scheduling.step_plan import ScheduledSequence, SchedulerOutput
from engine.sequence import Sequence, SequenceStatus

logger = logging.getLogger(__name__)

PLACEHOLDER = 0
"""Verified, if it is not replaced, as any wrong guess is."""


@dataclass(slots=True, eq=False)
class _DraftedSequence:
    """The tokens of one sequence that the draft model has computed, from its last preemption on."""

    seq: Sequence
    shadow: Sequence
    """The same text and blocks, with what a draft is drawn by."""
    attempt: int
    num_computed: int = 0
    """Leading known tokens whose KV is there."""
    guessed: list[int] = field(default_factory=list)
    """Drafts behind them whose KV is there, too."""
    first_block: int = 0
    blocks: list[int] = field(default_factory=list)
    """The sequence's blocks from the first one on that could be exchanged when they were written
    to."""
    failed: bool = False

    @property
    def stands(self) -> bool:
        seq = self.seq
        return seq.status is SequenceStatus.RUNNING and seq.num_preemptions == self.attempt

    def settle(self, block_size: int) -> None:
        """Keep what is still true after the steps since it was computed."""
        seq = self.seq
        known = seq.tokens(self.num_computed, self.num_computed + len(self.guessed))
        for token_id, guess in zip(known, self.guessed, strict=False):
            if token_id != guess:
                break
            self.num_computed += 1
        self.guessed = []
        # The last known token is computed to draw behind it.
        self.num_computed = min(self.num_computed, seq.num_tokens - 1)
        now = seq.block_table[self.first_block : self.first_block + len(self.blocks)]
        if now != self.blocks:
            pairs = zip(self.blocks, now, strict=False)
            same = next((i for i, (old, new) in enumerate(pairs) if old != new), len(now))
            self.num_computed = min(self.num_computed, (self.first_block + same) * block_size)

    def note(self, num_computed: int, guessed: list[int]) -> None:
        """So much was computed, in the blocks that the sequence has now."""
        self.num_computed, self.guessed = num_computed, guessed
        self.first_block = self.seq.num_registered_blocks
        self.blocks = self.seq.block_table[self.first_block :]

    def entry(self, start: int, end: int, output_index: int | None) -> ScheduledSequence:
        """Compute positions [start, end), and, with an output index, draw what follows."""
        self.shadow.block_table = self.seq.block_table
        return ScheduledSequence(
            self.shadow,
            end - start,
            start=start,
            samples=output_index is not None,
            output_index=output_index or 0,
            attempt=0,
        )


class Drafter:
    """A `Proposer`."""

    def __init__(
        self,
        runner: ModelRunner,
        num_drafts: int,
        *,
        block_size: int,
        max_num_tokens: int,
        max_model_len: int,
        has_graphs: bool = False,
    ) -> None:
        """max_num_tokens: that `runner` computes at once. max_model_len: longest text that the
        draft model knows; behind it nothing is drafted. has_graphs: `runner` has, of decodes."""
        assert num_drafts >= 1
        self._runner = runner
        self._num_drafts = num_drafts
        self._block_size = block_size
        self._max_num_tokens = max_num_tokens
        self._max_model_len = max_model_len
        self._has_graphs = has_graphs
        self._held: dict[Sequence, _DraftedSequence] = {}
        self._behind: list[_DraftedSequence] = []
        """Those that should catch up in this step."""
        self._was_catching_up = False

    def keep_only(self, seqs: Iterable[Sequence]) -> None:
        self._behind = []
        kept = set(seqs)
        for seq, held in list(self._held.items()):
            if seq not in kept or not held.stands:
                del self._held[seq]
                held.shadow.status = SequenceStatus.FINISHED  # its row in the runner is free

    def propose(self, seq: Sequence) -> list[int]:
        """Placeholders, for a sequence that the draft model has all but caught up with."""
        # The last draft is drawn behind the token before it: that one must have a position.
        room = self._max_model_len + 1 - seq.num_tokens
        count = min(self._num_drafts, room)
        held = self._held_of(seq)
        if count < 1 or held.failed:
            return []
        held.settle(self._block_size)
        if seq.num_tokens - held.num_computed > 1 + self._num_drafts:
            self._behind.append(held)
            return []
        return [PLACEHOLDER] * count

    def fill(self, output: SchedulerOutput, room: int) -> bool:
        """Replace the placeholders that got room in the step, and let others catch up by `room`
        tokens at most. Whether any did: the time of such a step says nothing of a usual one."""
        budget = self._max_num_tokens
        drafting: list[tuple[ScheduledSequence, _DraftedSequence]] = []
        for entry in output.scheduled:
            if not entry.draft_token_ids:
                continue
            held = self._held[entry.seq]
            held.settle(self._block_size)
            num_missing = entry.start + 1 - held.num_computed
            if num_missing <= budget:
                budget -= num_missing
                drafting.append((entry, held))
        # Never twice in a row where plain steps could be timed: one of two shows what they take.
        prompts = any(not entry.decodes for entry in output.scheduled)
        portions: list[tuple[_DraftedSequence, int]] = []
        if prompts or not self._was_catching_up:
            portions = self._portions(min(room, budget))
        self._was_catching_up = bool(portions)
        if drafting or portions:
            self._run(drafting, portions)
        return bool(portions)

    def _held_of(self, seq: Sequence) -> _DraftedSequence:
        held = self._held.get(seq)
        if held is None:
            # Nobody reads log-probabilities of drafts, and a grammar is kept to by what verifies.
            sampling = msgspec.structs.replace(seq.sampling, logprobs=None, logprob_token_ids=())
            shadow = replace(seq, sampling=sampling, adapter="", constraint=None, block_table=[])
            held = self._held[seq] = _DraftedSequence(seq, shadow, seq.num_preemptions)
        return held

    def _portions(self, room: int) -> list[tuple[_DraftedSequence, int]]:
        """Return who catches up, and to which of the tokens that the large model has computed."""
        portions = []
        for held in self._behind:
            end = min(held.num_computed + room, held.seq.num_computed_tokens)
            if held.stands and end > held.num_computed:
                room -= end - held.num_computed
                portions.append((held, end))
        return portions

    def _run(
        self,
        drafting: list[tuple[ScheduledSequence, _DraftedSequence]],
        portions: list[tuple[_DraftedSequence, int]],
    ) -> None:
        """A failure costs the guesses of those it touches, as long as they run, and no request."""
        try:
            drawn = self._draw(drafting, portions)
        except Exception:
            touched = [held for _, held in drafting] + [held for held, _ in portions]
            logger.exception("drafting failed, no more of it for %d sequences", len(touched))
            for held in touched:
                held.failed = True
            return
        for (entry, held), drafts in zip(drafting, drawn, strict=True):
            entry.draft_token_ids[: len(drafts)] = drafts
            held.note(entry.start + 1, drafts[: len(entry.draft_token_ids) - 1])
        for held, end in portions:
            held.note(end, [])

    def _draw(
        self,
        drafting: list[tuple[ScheduledSequence, _DraftedSequence]],
        portions: list[tuple[_DraftedSequence, int]],
    ) -> list[list[int]]:
        """Drafts for each of `drafting`; fewer than asked where logits are not finite."""
        if self._has_graphs and not portions:
            self._make_up(drafting)
        first = [held.entry(held.num_computed, end, None) for held, end in portions]
        first += [
            held.entry(held.num_computed, entry.start + 1, entry.output_index)
            for entry, held in drafting
        ]
        launched = [self._launch(first, None)]
        for ahead in range(1, max((len(e.draft_token_ids) for e, _ in drafting), default=0)):
            passing = [
                held.entry(entry.start + ahead, entry.start + ahead + 1, entry.output_index + ahead)
                for entry, held in drafting
                if len(entry.draft_token_ids) > ahead
            ]
            launched.append(self._launch(passing, launched[-1]))
        drawn: list[list[int]] = [[] for _ in drafting]
        for number, each in enumerate(launched):
            sampled = self._runner.collect(each)
            for (entry, _), drafts in zip(drafting, drawn, strict=True):
                found = sampled.get(entry.key)
                if found is not None and len(drafts) == number:
                    drafts.append(found[0][0])
        return drawn

    def _make_up(self, drafting: list[tuple[ScheduledSequence, _DraftedSequence]]) -> None:
        """Compute the one token that some lack before their last, if nobody lacks more: so that the
        passes behind it are decodes. What it draws is not looked at: the next token is known."""
        missing = [entry.start - held.num_computed for entry, held in drafting]
        if max(missing) != 1:
            return
        self._launch(
            [
                held.entry(held.num_computed, entry.start, entry.output_index)
                for (entry, held), lacking in zip(drafting, missing, strict=True)
                if lacking
            ],
            None,
        )
        for entry, held in drafting:
            held.num_computed = entry.start

    def _launch(
        self, entries: list[ScheduledSequence], before: LaunchedStep | None
    ) -> LaunchedStep:
        num_tokens = sum(entry.num_new_tokens for entry in entries)
        return self._runner.launch(SchedulerOutput(entries, [], num_tokens), before)
