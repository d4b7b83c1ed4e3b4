"""One choice of one request while it is generated, or its prompt while that is embedded; and what
all choices of a request share.

Knows neither where blocks come from nor who runs next. Counts are tokens, times are seconds of the
scheduler's clock.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.config import Pooling
from engine.fairness import LANE_RANKS
from engine.protocol import (
    Breakpoint,
    EngineRequest,
    FinishReason,
    Lane,
    SamplingParams,
    SeenPrefix,
    TokenLogprobs,
    Usage,
)
from engine.token_counts import Counted, TokenCounts

FREED = -1
"""A block table's entry whose block was given back because it lies outside the sliding window. The
entry stays, so that entry i always stands for tokens [i * block_size, (i + 1) * block_size)."""


LONG_PROMPT = 4096
"""Tokens that are not cached; what is shorter is over in a few steps."""

Key = tuple[str, int]
"""A choice by its request's id and its index."""
SampledTokens = list[tuple[int, TokenLogprobs | None]]
"""The tokens that one step sampled for one choice: the drafts it verified, and one token after
them."""


class SequenceStatus(Enum):
    WAITING = "waiting"
    """Holds no blocks; a preempted sequence is WAITING again and keeps its output."""
    RUNNING = "running"
    FINISHED = "finished"


class Constraint(Protocol):
    """The rule about what a choice may say. Where it stands follows from what was said alone, which
    it is shown whenever it is asked: all of the output so far, so that nobody has to tell it of
    preemptions or of guesses that were wrong.
    """

    def copy(self) -> Constraint:
        """For another choice, which has said nothing yet."""

    @property
    def gave_up(self) -> bool:
        """Whether a mask was all clear because the rule outgrew its limits: it is told no more."""

    def is_over(self, said: list[int]) -> bool:
        """Whether nothing can follow."""

    def forced(self, said: list[int]) -> list[int]:
        """Return what it leaves no choice about behind `said`, as far as it can tell; or nothing. A
        guess: what may be said is for masks to say.
        """

    def allow(self, said: list[int], drafts: list[int], mask: NDArray[np.int32]) -> None:
        """Clear the bits of what may not follow `said` and `drafts`. mask: all set, a bit for each
        token, from the lowest of the first word on. Stays as it is where all is allowed, and behind
        drafts that are not, or behind the last. All clear where nothing can be said any more."""

    @staticmethod
    def allow_all(
        asked: Rows[tuple[int, Any, list[int], list[int]]], masks: NDArray[np.int32]
    ) -> None:
        """`allow` for many of one kind: row of `masks`, whose, said, drafts."""


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request with `seed`: the first 8 bytes, little-endian, of
    BLAKE2b (RFC 7693) over the ASCII text "<seed>:<index>". 0 <= result < 2**64."""
    digest = hashlib.blake2b(b"%d:%d" % (seed, index), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice. The first `num_computed_tokens` of its `num_tokens` have their KV in the blocks
    of `block_table`; a step computes the next, and the step that catches up samples one more, or
    completes the prompt's embedding."""

    request_id: str
    index: int
    """As in `EngineRequest`: of its prompt, and there its choice."""
    order: tuple[int, int]
    """(arrival number of the request, index): smaller came earlier."""
    prompt_token_ids: list[int]
    """Shared by all choices of the request; never changed."""
    sampling: SamplingParams
    """As asked, with max_tokens cut to what the context leaves."""
    seed: int
    """Resolved, 0 <= seed < 2**64 (`choice_seed`)."""
    cache_salt: str
    """`EngineRequest.cache_namespace`"""
    adapter: str = ""
    pooling: Pooling | None = None
    """The pooling that makes an embedding of its hidden states; None: it generates."""
    dimensions: int | None = None
    """The length of the embedding; None: all."""
    scores: bool = False
    """The tokens of its prompt are wanted with their log-probabilities."""
    constraint: Constraint | None = None
    """The grammar constraint on its output; None: unconstrained."""
    lane: Lane = "interactive"
    tenant: str = ""
    weight: float = 1.0
    """The weight of the tenant."""
    priority: int = 0
    """As `EngineRequest.priority`."""
    output_token_ids: list[int] = field(default_factory=list)
    """Generated so far, a final EOS or stop token included."""
    num_said: int = 0
    """The first ones of the output, which another engine generated (`EngineRequest.said`)."""
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    """Block ids by position; the first `num_freed_blocks` entries are FREED."""
    num_freed_blocks: int = 0
    block_digests: list[bytes] = field(default_factory=list)
    """Chained content digests of the leading full blocks, as far as they were asked for."""
    num_registered_blocks: int = 0
    """Leading blocks of `block_table` that the prefix cache knows."""
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache when first scheduled; None before, frozen after."""
    num_found: int = 0
    """Leading tokens that the prefix cache had when it began to wait, the last time it did."""
    num_charged_tokens: int = 0
    """Leading ones of the prompt that its tenant was charged for, or that it found in the cache:
    what is computed again costs nothing."""
    num_preemptions: int = 0
    num_trials: int = 0
    """How often it was computed alone because a step failed, since one with others passed."""
    num_in_flight: int = 0
    """Tokens whose KV is being computed by steps that were scheduled and not yet taken in."""
    num_pending: int = 0
    """Tokens that those steps will sample: known to the device, not yet to us."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """The logprobs of the prompt's tokens after the first, as far as they were computed."""
    draft_token_ids: list[int] = field(default_factory=list)
    """Guesses of what follows the last known token; the next step may verify them."""
    _token_counts: TokenCounts | None = None
    """None before a penalty asks for them."""
    key: Key = field(init=False)
    turn: tuple[int, int, int] = field(init=False)
    """Priority, then `order`: of a tenant's that wait in a lane, who is started first."""
    precedence: tuple[int, int, int] = field(init=False)
    """Rank of the lane, then `order`: of those that run, who comes first gives way last."""
    is_adjusted: bool = field(init=False)
    """Whether what is asked for is not what its logits say: but for a least length, which is over
    some day."""

    def __post_init__(self) -> None:
        """Make once what every step asks for."""
        self.key = (self.request_id, self.index)
        self.turn = (self.priority, *self.order)
        self.precedence = (LANE_RANKS[self.lane], *self.order)
        asked = self.sampling
        bound = self.constraint is not None
        self.is_adjusted = bound or asked.penalises or bool(asked.logit_bias)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output, a fresh list; prefer `tokens` where a slice will do."""
        return self.prompt_token_ids + self.output_token_ids

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at positions [start, stop), without copying the rest. 0 <= start <= stop."""
        boundary = len(self.prompt_token_ids)
        if stop <= boundary:
            return self.prompt_token_ids[start:stop]
        if start >= boundary:
            return self.output_token_ids[start - boundary : stop - boundary]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - boundary]

    def token_counts(self, drafts: Rows[int]) -> Counted:
        """Return how often each token was said, here and by `drafts` behind it; see
        `TokenCounts.count`."""
        if self._token_counts is None:
            self._token_counts = TokenCounts(self.prompt_token_ids)
        return self._token_counts.count(self.output_token_ids, drafts)

    @property
    def embeds(self) -> bool:
        return self.pooling is not None

    @property
    def lacks_scores(self) -> bool:
        """Some of its prompt has still to be computed for what is said of it: keys and values that
        are there already do not tell."""
        return self.scores and len(self.prompt_logprobs) < len(self.prompt_token_ids) - 1

    def num_scored(self, start: int, end: int) -> int:
        """Positions from `start` on that tell of a token of the prompt, of those before `end`."""
        last = len(self.prompt_token_ids) - 1
        return max(0, min(end, last) - start) if self.lacks_scores else 0

    def score(self, start: int, logprobs: list[TokenLogprobs]) -> None:
        """Add what the positions from `start` on tell; some may be known, of before a
        preemption.
        """
        self.prompt_logprobs += logprobs[len(self.prompt_logprobs) - start :]

    @property
    def is_long(self) -> bool:
        """Return whether what it computes before its first token is long; once it runs that does
        not change.
        """
        known = self.num_prompt_tokens + self.num_said
        return known - (self.num_cached_tokens or 0) > LONG_PROMPT

    @property
    def num_missing(self) -> int:
        """Tokens, known here or on the device, whose KV no step computes yet."""
        known = len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_pending
        return known - self.num_computed_tokens - self.num_in_flight

    def waits_for_pending(self, penalties_ahead: bool) -> bool:
        """Penalties and grammars look at all that was said. Where a device can penalise what only
        it knows, penalties need not wait for it."""
        if not self.is_adjusted:
            return False
        return self.constraint is not None or (self.sampling.penalises and not penalties_ahead)

    def say(
        self, tokens: SampledTokens, eos_token_ids: frozenset[int]
    ) -> tuple[SampledTokens, FinishReason | None]:
        """Add sampled tokens up to one that ends the sequence; those behind it never were. What was
        added, and why it ends."""
        for index, (token_id, _) in enumerate(tokens):
            self.output_token_ids.append(token_id)
            if (reason := self._reason_to_end(eos_token_ids)) is not None:
                return tokens[: index + 1], reason
        return tokens, None

    def _reason_to_end(self, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """As what it has said, something, ends it. An EOS or stop token is part of the output:
        generated, counted."""
        sampling, said = self.sampling, self.output_token_ids
        if len(said) >= sampling.min_tokens:
            is_eos = said[-1] in eos_token_ids and not sampling.ignore_eos
            if is_eos or said[-1] in sampling.stop_token_ids:
                return "stop"
        if self.constraint is not None and self.constraint.is_over(said):
            return "stop"
        return "length" if len(said) >= sampling.max_tokens else None

    def finish(self, reason: FinishReason) -> None:
        """Nothing more is said. The constraint and the counts, which may be large, are let go of:
        whoever remembers the sequence does not keep them."""
        self.status = SequenceStatus.FINISHED
        self.finish_reason = reason
        self.constraint = self._token_counts = None

    @property
    def num_held_blocks(self) -> int:
        return len(self.block_table) - self.num_freed_blocks


def sequences_of(
    request: EngineRequest,
    *,
    arrival: int,
    seed: int,
    max_model_len: int,
    pooling: Pooling,
    constraint: Constraint | None = None,
) -> tuple[Sequence, ...]:
    """The choices of a request, which must fit; those that ended elsewhere are finished. arrival:
    its number. seed: of the whole request. constraint: of each choice."""
    sampling, namespace, n = request.sampling, request.cache_namespace, request.n
    is_seeded = sampling.seed is not None
    said, ended = request.said, frozenset(request.ended)

    def of(prompt: list[int], choice: int, index: int) -> Sequence:
        output = list(said[index]) if said else []
        has_ended = index in ended
        return Sequence(
            request_id=request.request_id,
            index=index,
            order=(arrival, index),
            prompt_token_ids=prompt,
            sampling=_within(sampling, max_model_len - len(prompt)),
            seed=choice_seed(seed, choice if is_seeded else index),
            cache_salt=namespace,
            adapter=request.adapter,
            pooling=pooling if request.embed else None,
            dimensions=request.dimensions,
            scores=sampling.prompt_logprobs is not None and choice == 0,
            constraint=None if has_ended else constraint and constraint.copy(),
            output_token_ids=output,
            num_said=len(output),
            status=SequenceStatus.FINISHED if has_ended else SequenceStatus.WAITING,
            lane=request.lane,
            tenant=request.tenant,
            weight=request.weight,
            priority=request.priority,
        )

    return tuple(
        of(prompt, choice, number * n + choice)
        for number, prompt in enumerate(request.prompts)
        for choice in range(n)
    )


def still_open(choices: Rows[Sequence]) -> tuple[Sequence, ...]:
    return tuple(seq for seq in choices if seq.status is not SequenceStatus.FINISHED)


def _within(sampling: SamplingParams, room: int) -> SamplingParams:
    if sampling.max_tokens <= room:
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=room)


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """As in `Usage`."""

    kept_tokens: int = 0
    written_tokens: tuple[int, ...] = ()


NOTHING_KEPT = KeptTokens()


@dataclass(slots=True, eq=False)
class PromptState:
    """The state that the choices of one prompt share. `choices`: those that had not ended when the
    request came."""

    choices: tuple[Sequence, ...]
    cached_tokens: int | None = None
    """None before any of them was scheduled, frozen after."""
    tier_tokens: int = 0
    """Those of them that a tier brought."""
    fetched_tokens: int = 0
    """Those that another engine had."""
    seen: SeenPrefix | None = None
    is_prefilled: bool = False


@dataclass(slots=True, eq=False)
class RequestState:
    """The state that all choices of one request share: the bill and the clock."""

    request_id: str
    sequences: tuple[Sequence, ...]
    """Index i at i."""
    arrival_s: float
    n: int = 1
    """Choices of each prompt."""
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    """The moment of the first token, or of the embedding."""
    deadline_s: float = math.inf
    """The deadline on the same clock; nothing of the sequence begins after it."""
    is_paused: bool = False
    log_id: str = ""
    """Its name in the log, as in `EngineRequest`."""
    breakpoints: tuple[Breakpoint, ...] = ()
    prompt_tokens: int = field(init=False)
    cached_tokens: int = 0
    tier_tokens: int = 0
    fetched_tokens: int = 0
    """As in `Usage`, all four."""
    kept: KeptTokens = NOTHING_KEPT
    """Frozen when the first choice is first scheduled."""
    generated_tokens: int = 0
    resumed_tokens: int = 0
    """As in `Usage`, both."""
    num_unfinished: int = field(init=False)
    """Choices still open."""
    prompts: list[PromptState] = field(init=False)

    def __post_init__(self) -> None:
        starts = range(0, len(self.sequences), self.n)
        self.prompts = [PromptState(still_open(self.sequences[i : i + self.n])) for i in starts]
        asked = [each.choices for each in self.prompts if each.choices]
        self.num_unfinished = sum(map(len, asked))
        self.prompt_tokens = sum(choices[0].num_prompt_tokens for choices in asked)

    def prompt_of(self, seq: Sequence) -> PromptState:
        return self.prompts[seq.index // self.n]

    def schedule_prompt(self, prompt: PromptState, cached_tokens: int) -> None:
        prompt.cached_tokens = cached_tokens
        if self.first_token_s is None:
            self.cached_tokens += cached_tokens

    def load_prompt(self, prompt: PromptState, tier_tokens: int, fetched_tokens: int) -> None:
        """Note what of a prompt that was just scheduled tiers and another engine brought."""
        prompt.tier_tokens, prompt.fetched_tokens = tier_tokens, fetched_tokens
        if self.first_token_s is None:
            self.tier_tokens += tier_tokens
            self.fetched_tokens += fetched_tokens

    def prefill_prompt(self, prompt: PromptState, now: float) -> None:
        """Its first token, or its embedding, is there."""
        prompt.is_prefilled = True
        if self.first_token_s is None:
            self.first_token_s = now
            self.prompt_tokens = self.cached_tokens = 0
            self.tier_tokens = self.fetched_tokens = 0
        self.prompt_tokens += prompt.choices[0].num_prompt_tokens
        self.cached_tokens += prompt.cached_tokens or 0
        self.tier_tokens += prompt.tier_tokens
        self.fetched_tokens += prompt.fetched_tokens

    def usage(self) -> Usage:
        """Cumulative over all choices, as of now."""
        scheduled_s, token_s = self.first_scheduled_s, self.first_token_s
        if scheduled_s is None:
            return Usage(prompt_tokens=self.prompt_tokens)
        # The step that finishes a prompt also samples its first token, or embeds it: one moment.
        return Usage(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            kept_tokens=self.kept.kept_tokens,
            written_tokens=self.kept.written_tokens,
            tier_tokens=self.tier_tokens,
            fetched_tokens=self.fetched_tokens,
            seen=self.prompts[0].seen,
            generated_tokens=self.generated_tokens,
            resumed_tokens=self.resumed_tokens,
            prefilled=token_s is not None,
            queue_time_s=scheduled_s - self.arrival_s,
            prefill_time_s=0.0 if token_s is None else token_s - scheduled_s,
            first_token_time_s=0.0 if token_s is None else token_s - self.arrival_s,
        )
