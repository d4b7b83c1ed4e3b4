"""Who runs next: one token budget a step, shared by decodes and chunks of prompts.

Above: `core.py` calls schedule(), runs the model on the output, hands the sampled ids to update().
Below: `prefix_cache.py` owns the blocks. Knows no tensors, tenants or sockets; the clock is given.

There are no phases. A sequence has `num_tokens` known tokens, of which `num_computed_tokens` have
their KV; each step brings some sequences closer to catching up, and one that catches up samples a
token. Decodes lack one token, prompts and recomputations lack many; decodes are served first, so a
long prompt never holds them up: it takes what is left of the budget, a chunk a step.

A step may be scheduled while the one before still runs (`core.py` says how far ahead). What that
one will sample is pending: counted, given a place, not yet known; so a stop is noticed one step
late, and what the late step computed for a finished sequence is dropped, unseen and unbilled.
Sequences with `draft_token_ids` have them verified in one step, as far as there is room to spare.
A sequence that embeds is a prompt like others; the step that catches up ends it.

Both queues are kept in order of arrival. When blocks run out, a running sequence takes them from
the latest running one, which starts over from the front of the waiting queue with its output kept.
Nobody takes blocks from an earlier one, and all blocks together hold the longest sequence, so the
earliest running sequence computes something at every step: no deadlock, no livelock, no starvation.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable

from engine.config import Pooling
from engine.errors import EngineOverloaded, InvalidRequest
from engine.pace import Pace
from engine.prefix_cache import PrefixCache, max_blocks_per_sequence
from engine.protocol import EngineOutput, EngineRequest, FinishReason
from engine.schedule import (
    NOTHING_EMBEDDED,
    Embedded,
    Sampled,
    SchedulerOutput,
    StepPlan,
)
from engine.sequence import (
    FREED,
    Constraint,
    RequestState,
    SampledTokens,
    Sequence,
    SequenceStatus,
    sequences_of,
)
from engine.validation import check_request

LEAVE_SHARE = 4
"""A prompt that cannot be finished in a step leaves one part in so many to shorter ones behind."""
LOOK_BEHIND = 32
"""Waiting sequences looked at in search of a shorter one."""


def _order(seq: Sequence) -> tuple[int, int]:
    return seq.order


def _remove(queue: list[Sequence], seq: Sequence) -> bool:
    """Take `seq` out of a queue sorted by order, if it is there."""
    at = bisect_left(queue, seq.order, key=_order)
    if at == len(queue) or queue[at] is not seq:
        return False
    del queue[at]
    return True


class Scheduler:
    """`cache` says how many blocks there are, how large, and which sliding window applies. `clock`
    returns monotonic seconds; `seed` starts the draws for requests that name no seed."""

    def __init__(
        self,
        *,
        cache: PrefixCache,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_waiting: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        clock: Callable[[], float] = time.monotonic,
        seed: int = 0,
        pace: Pace | None = None,
        max_steps_in_flight: int = 1,
        penalties_ahead: bool = False,
        pooling: Pooling = "last",
    ) -> None:
        """pace: bounds the prompt tokens of steps that also decode; None: only the budget does.
        max_steps_in_flight: how many outputs of schedule() may wait for their update().
        penalties_ahead: a token that is pending can be penalised for being said again.
        pooling: of embeddings."""
        assert max_num_batched_tokens >= 1 and max_num_seqs >= 1 and max_waiting >= 1
        assert max_model_len >= 2, f"max_model_len {max_model_len}: a prompt and an answer"
        self.cache = cache
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.max_waiting = max_waiting
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_blocks_per_seq = max_blocks_per_sequence(
            max_model_len,
            block_size=cache.block_size,
            sliding_window=cache.sliding_window,
            max_num_batched_tokens=max_num_batched_tokens,
            max_steps_in_flight=max_steps_in_flight,
        )
        num_blocks = cache.pool.num_blocks
        assert num_blocks >= self.max_blocks_per_seq, (
            f"{num_blocks} blocks of {cache.block_size} tokens cannot hold one sequence of"
            f" max_model_len {max_model_len}: it takes {self.max_blocks_per_seq}"
        )
        self.num_preemptions = 0
        self.prefix_cache_query_tokens = 0
        self.prefix_cache_hit_tokens = 0
        self.pace = pace or Pace(None)
        self._penalties_ahead = penalties_ahead
        self._pooling: Pooling = pooling
        self._clock = clock
        self._random = random.Random(seed)
        self._num_arrived = 0
        self._num_open = 0
        """Unfinished sequences."""
        self._num_queued = 0
        """Requests none of whose choices ever ran; at most `max_waiting`."""
        self._requests: dict[str, RequestState] = {}
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []
        """Both sorted by order. A choice that waits for its request's choice 0 is in neither."""

    # What goes in

    def add(self, request: EngineRequest, constraint: Constraint | None = None) -> None:
        """Queue a request. InvalidRequest (naming `param`) or ContextLengthExceeded when it can
        never run, EngineOverloaded when `max_waiting` requests are queued; nothing is kept then."""
        check_request(request, vocab_size=self.vocab_size, max_model_len=self.max_model_len)
        if request.request_id in self._requests:
            raise InvalidRequest("request_id is in use by a running request", param="request_id")
        if self._num_queued >= self.max_waiting:
            raise EngineOverloaded(f"{self._num_queued} requests are waiting, the queue is full")
        seed = request.sampling.seed
        sequences = sequences_of(
            request,
            arrival=self._num_arrived,
            seed=self._random.getrandbits(64) if seed is None else seed,
            max_model_len=self.max_model_len,
            pooling=self._pooling,
            constraint=constraint,
        )
        self._requests[request.request_id] = RequestState(
            request.request_id, sequences, arrival_s=self._clock()
        )
        self._num_arrived += 1
        self._num_open += request.n
        self._num_queued += 1
        # The other choices find the prompt in the cache when choice 0 has computed it (`update`).
        self._waiting.extend(sequences[:1] if self.cache.enabled else sequences)

    def abort(self, request_id: str) -> list[EngineOutput]:
        """End a request and free its blocks now. A last output for each open choice, all with the
        final usage; none when the id is unknown or finished."""
        state = self._requests.get(request_id)
        return [] if state is None else self._end(state, "abort", None)

    # The step

    def schedule(self) -> SchedulerOutput:
        """Decide the next step and give it its blocks. Each output must be handed, in order, to
        update() or fail_batch(). Empty when nothing is unfinished, or when all that is waits for
        steps in flight."""
        step = StepPlan(self.max_num_batched_tokens)
        self._schedule_decodes(step)
        step.budget = self.pace.prompt_tokens(len(step.scheduled), step.budget)
        self._schedule_prompts(step)
        if not step.preempted:
            self._admit(step)
            self._top_up(step)
        for entry in step.scheduled.values():
            entry.seq.num_in_flight += entry.num_new_tokens
            entry.seq.num_pending += entry.samples
            entry.seq.draft_token_ids = []
        entries = list(step.scheduled.values())
        return SchedulerOutput(entries, step.preempted, step.num_tokens)

    def update(
        self, output: SchedulerOutput, sampled: Sampled, embedded: Embedded = NOTHING_EMBEDDED
    ) -> list[EngineOutput]:
        """Take in what the step computed: `sampled` has exactly the entries that sample, `embedded`
        those that embed. Returns an output for each of them. Sequences that ended or were preempted
        since schedule() are passed over."""
        wanted = {entry.key for entry in output.scheduled if entry.samples}
        assert sampled.keys() == wanted, f"sampled {sampled.keys() ^ wanted} against the schedule"
        wanted = {entry.key for entry in output.scheduled if entry.embeds}
        assert embedded.keys() == wanted, f"embedded {embedded.keys() ^ wanted}"
        now = self._clock()
        outputs: list[EngineOutput] = []
        for entry in output.scheduled:
            seq = entry.seq
            if not entry.stands():
                continue
            seq.num_in_flight -= entry.num_new_tokens
            seq.num_pending -= entry.samples
            tokens = sampled[entry.key] if entry.samples else []
            num_rejected = len(entry.draft_token_ids) + entry.samples - len(tokens)
            said, reason = seq.say(tokens, self.eos_token_ids)
            computed = entry.start + entry.num_new_tokens - num_rejected
            seq.num_computed_tokens = min(computed, seq.num_tokens)
            self.cache.register(seq)
            self.cache.slide(seq)
            if entry.embeds:
                reason = "stop"
            if entry.answers:
                outputs.append(self._answer(seq, said, reason, now, embedded.get(entry.key)))
        return outputs

    def fail_batch(self, output: SchedulerOutput) -> list[EngineOutput]:
        """The step raised: end every request in it. What it computed is not trusted, so nothing
        of it enters the prefix cache. A last output for each of their open choices."""
        return [
            last
            for entry in output.scheduled
            if entry.stands()  # not ended with an earlier choice of the same request
            for last in self._end(self._requests[entry.key[0]], "error", "engine_step_failed")
        ]

    # What there is

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold blocks, in order of arrival; not to be changed."""
        return self._running

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that do not: queued, preempted, or waiting for their request's choice 0."""
        return self._num_open - len(self._running)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self.cache.num_available

    @property
    def kv_cache_usage(self) -> float:
        """Blocks held by sequences over all blocks, 0..1."""
        return 1.0 - self.cache.num_available / self.cache.pool.num_blocks

    def check_integrity(self) -> None:
        """AssertionError unless queues, requests and blocks tell one story. For tests and idle
        moments: O(blocks + tokens)."""
        open_sequences = []
        for state in self._requests.values():
            unfinished = [s for s in state.sequences if s.status is not SequenceStatus.FINISHED]
            assert len(unfinished) == state.num_unfinished > 0, f"{state.request_id}: miscounted"
            open_sequences += unfinished
        running = [s for s in open_sequences if s.status is SequenceStatus.RUNNING]
        parked = [s for s in open_sequences if self._is_parked(s)]
        waiting = [s for s in open_sequences if s not in running and s not in parked]
        assert self._running == sorted(running, key=_order), "the running queue is wrong"
        assert self._waiting == sorted(waiting, key=_order), "the waiting queue is wrong"
        assert len(running) <= self.max_num_seqs
        assert self._num_open == len(open_sequences)
        queued = sum(state.first_scheduled_s is None for state in self._requests.values())
        assert self._num_queued == queued <= self.max_waiting
        for seq in waiting + parked:
            assert not seq.block_table and seq.num_computed_tokens == 0, "waiting with blocks"
        for seq in running:
            assert seq.num_held_blocks <= self.max_blocks_per_seq, "more than the window needs"
            assert seq.num_computed_tokens < seq.num_tokens <= self.max_model_len
            covered = len(seq.block_table) * self.cache.block_size
            assert seq.num_computed_tokens + seq.num_in_flight <= covered, "computed off the table"
        self.cache.check_integrity(running)

    # How

    def _schedule_decodes(self, step: StepPlan) -> None:
        """Serve the sequences that lack one token, earliest first, and their drafts as far as
        there is room beside all of them; half of that is left to prompts, if there are any."""
        decodes = [seq for seq in self._running if seq.num_missing == 1 and self._goes_on(seq)]
        room = max(0, step.budget - len(decodes))
        if self._waiting or any(seq.num_missing > 1 for seq in self._running):
            room //= 2
        for seq in decodes:
            if step.budget == 0 or seq.status is not SequenceStatus.RUNNING:
                return  # preempted by an earlier one, and so are all behind it
            start = seq.num_computed_tokens + seq.num_in_flight
            drafts = self._drafts(seq, room)
            if drafts and self.cache.grow(seq, start + 1 + len(drafts)):
                step.put(seq, 1, drafts)
                room -= len(drafts)
            elif self._make_room(step, seq, start + 1):
                step.put(seq, 1)

    def _goes_on(self, seq: Sequence) -> bool:
        """Whether what is pending leaves anything to sample, and lets it be sampled now. A prompt
        to be embedded goes on to its end."""
        if seq.num_pending and seq.waits_for_pending(self._penalties_ahead):
            return False
        return seq.embeds or seq.num_output_tokens + seq.num_pending < seq.sampling.max_tokens

    def _drafts(self, seq: Sequence, room: int) -> list[int]:
        """The drafts worth verifying: the last token of all is never one."""
        if seq.num_pending or seq.embeds:
            return []
        left = seq.sampling.max_tokens - seq.num_output_tokens - 1
        return seq.draft_token_ids[: min(room, left)]

    def _schedule_prompts(self, step: StepPlan) -> None:
        """Serve the running sequences that lack more, earliest first."""
        index = 0
        while index < len(self._running) and step.budget > 0:
            seq = self._running[index]
            index += 1
            if seq.num_missing > 1:
                num_new_tokens = self._share(step, seq)
                end = seq.num_computed_tokens + seq.num_in_flight + num_new_tokens
                if self._make_room(step, seq, end):
                    step.put(seq, num_new_tokens)

    def _share(self, step: StepPlan, seq: Sequence) -> int:
        """Tokens of the budget for a prompt: all it can use, but one that will not be through
        leaves a part to a shorter one behind it."""
        missing = seq.num_missing
        if missing <= step.budget:
            return missing
        if not self._shorter_behind(seq, missing):
            return step.budget
        return step.budget - step.budget // LEAVE_SHARE

    def _shorter_behind(self, seq: Sequence, missing: int) -> bool:
        at = bisect_left(self._running, seq.order, key=_order)
        if any(1 < other.num_missing < missing for other in self._running[at + 1 :]):
            return True
        if len(self._running) >= self.max_num_seqs:
            return False
        return any(other.num_tokens < missing for other in self._waiting[:LOOK_BEHIND])

    def _top_up(self, step: StepPlan) -> None:
        """Give what nobody took back to the prompts, without preempting for it."""
        for entry in list(step.scheduled.values()):
            if step.budget == 0:
                return
            if not entry.answers:
                seq = entry.seq
                num_new_tokens = min(seq.num_missing, entry.num_new_tokens + step.budget)
                if self.cache.grow(seq, entry.start + num_new_tokens):
                    step.remove(seq)
                    step.put(seq, num_new_tokens)

    def _make_room(self, step: StepPlan, seq: Sequence, num_tokens: int) -> bool:
        """Let the table of `seq` cover `num_tokens`, at the cost of later sequences. False when it
        is the latest itself: it keeps its blocks and sits this step out."""
        while not self.cache.grow(seq, num_tokens):
            if self._running[-1] is seq:
                return False
            victim = self._running.pop()
            self._release(victim)
            victim.status = SequenceStatus.WAITING
            victim.num_preemptions += 1
            self.num_preemptions += 1
            insort(self._waiting, victim, key=_order)
            step.take_back(victim)
        return True

    def _admit(self, step: StepPlan) -> None:
        """Start waiting sequences, strictly in order, while all known tokens of the next fit beside
        what the running ones still need. Admitted on less, it would soon be preempted."""
        if not self._waiting or step.budget == 0:
            return
        needed = sum(map(self._num_needed, self._running))
        while self._waiting and step.budget > 0 and len(self._running) < self.max_num_seqs:
            spare = self.cache.num_available - needed
            if spare <= 0:
                return
            seq = self._waiting[0]
            table = self.cache.match(seq)
            total = min(self.cache.num_blocks_for(seq.num_tokens), self.max_blocks_per_seq)
            num_held = len(table) - table.count(FREED)
            if total - num_held + self.cache.num_idle(table) > spare:
                return
            self._start(seq, table)
            num_new_tokens = self._share(step, seq)
            grown = self.cache.grow(seq, seq.num_computed_tokens + num_new_tokens)
            assert grown, "a chunk needs no more blocks than the whole"
            step.put(seq, num_new_tokens)
            needed += self._num_needed(seq)

    def _num_needed(self, seq: Sequence) -> int:
        """Blocks a running sequence has yet to get: for its known tokens, and at least one."""
        total = min(self.cache.num_blocks_for(seq.num_tokens), self.max_blocks_per_seq)
        return max(1, total - seq.num_held_blocks)

    def _start(self, seq: Sequence, table: list[int]) -> None:
        """Move the first waiting sequence to the running ones, on a matched table."""
        del self._waiting[0]
        insort(self._running, seq, key=_order)
        seq.status = SequenceStatus.RUNNING
        self.cache.adopt(seq, table)
        if seq.num_cached_tokens is not None:
            return
        seq.num_cached_tokens = seq.num_computed_tokens
        state = self._requests[seq.request_id]
        if state.first_scheduled_s is None:
            state.first_scheduled_s = self._clock()
            state.cached_tokens = seq.num_cached_tokens
            self._num_queued -= 1
            if self.cache.serves(seq):
                self.prefix_cache_query_tokens += seq.num_prompt_tokens
                self.prefix_cache_hit_tokens += seq.num_cached_tokens

    def _answer(
        self,
        seq: Sequence,
        said: SampledTokens,
        reason: FinishReason | None,
        now: float,
        embedding: bytes | None,
    ) -> EngineOutput:
        """Tell what was appended or embedded, and finish the sequence if that was its end."""
        state = self._requests[seq.request_id]
        state.generated_tokens += len(said)
        if state.first_token_s is None:
            state.first_token_s = now
            if self.cache.enabled:
                for sibling in state.sequences[1:]:
                    insort(self._waiting, sibling, key=_order)
        if reason is not None:
            self._finish(state, seq, reason)
        return EngineOutput(
            request_id=seq.request_id,
            usage=state.usage(),
            index=seq.index,
            token_ids=[token_id for token_id, _ in said],
            logprobs=[entry for _, entry in said if entry is not None] or None,
            finish_reason=reason,
            finished=state.num_unfinished == 0,
            embedding=embedding,
        )

    def _finish(self, state: RequestState, seq: Sequence, reason: FinishReason) -> None:
        """End one choice, wherever it is, and free its blocks."""
        if seq.status is SequenceStatus.RUNNING:
            _remove(self._running, seq)
            self._release(seq)
        else:
            _remove(self._waiting, seq)
        seq.finish(reason)
        self._num_open -= 1
        state.num_unfinished -= 1
        if state.num_unfinished == 0:
            self._num_queued -= state.first_scheduled_s is None
            del self._requests[state.request_id]

    def _release(self, seq: Sequence) -> None:
        """Give its blocks back. Steps in flight may still write to them: whoever gets the blocks
        writes later, in the order of the device."""
        self.cache.release(seq)
        seq.num_in_flight = seq.num_pending = 0
        seq.draft_token_ids = []

    def _end(
        self, state: RequestState, reason: FinishReason, error_code: str | None
    ) -> list[EngineOutput]:
        """End all open choices of a request at once, each with an output of its own."""
        ended = [s for s in state.sequences if s.status is not SequenceStatus.FINISHED]
        for seq in ended:
            self._finish(state, seq, reason)
        usage = state.usage()
        return [
            EngineOutput(
                request_id=state.request_id,
                usage=usage,
                index=seq.index,
                finish_reason=reason,
                finished=seq is ended[-1],
                error_code=error_code,
            )
            for seq in ended
        ]

    def _is_parked(self, seq: Sequence) -> bool:
        """Whether the choice waits for choice 0 to compute the prompt that they share."""
        state = self._requests[seq.request_id]
        return self.cache.enabled and seq.index > 0 and state.first_token_s is None
