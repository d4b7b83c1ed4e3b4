"""Decides who runs next: one token budget a step, shared by decodes and chunks of prompts.

Knows no tensors and no sockets, and of tenants only their names; the clock is given.

There are no phases. A sequence has `num_tokens` known tokens, of which `num_computed_tokens` have
their KV; each step brings some sequences closer to catching up, and one that catches up samples a
token. Decodes lack one token, prompts and recomputations lack many; decodes are served first, so a
long prompt never holds them up: it takes what is left of the budget, a chunk a step.

A step may be scheduled while the one before still runs (`core.py` says how far ahead). What that
one will sample is pending: counted, given a place, not yet known; so a stop is noticed one step
late, and what the late step computed for a finished sequence is dropped, unseen and unbilled.
Sequences with `draft_token_ids` have them verified in one step, as far as there is room to spare.
A sequence that embeds is a prompt like others; the step that catches up ends it.

Whose turn it is, `fairness.py` says: who starts next, which prompt's chunk comes first, by counters
that are charged once for each token of a prompt that is computed, when it is scheduled, and for
each generated token, when it is known; what is computed again costs nothing. The next one starts
when all its known tokens fit; until they do nobody starts in its place, but for lanes beside its
own when it is its lane's limit that is in the way. When blocks run out somebody is preempted
(`running.py` says who): it starts over from its place in its tenant's queue, its output kept.

Why this always ends. The first of the running by precedence loses its blocks to nobody that runs,
and all blocks hold the longest sequence and are its for the taking: every step computes something,
if there is anything to compute. Only one that waits in a higher lane, with a lower counter, takes
its blocks; every such start raises that lane's counter, while a lane in which nothing new is
computed stays where it is, so that there are finitely many before the lower lane is next. Then
nobody else starts, what runs ends, and it fits. The same holds of tenants in a lane, and a
tenant's requests go in order of arrival: no deadlock, no livelock, no starvation.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice

from engine.config import Pooling
from engine.errors import EngineStepFailed, InvalidRequest
from engine.fairness import LANE_WEIGHTS, OUTPUT_COST, FairShare
from engine.kv_cache.block_holds import BlockHolds
from engine.kv_cache.miss_history import PromptMemory
from engine.kv_cache.prefix_cache import PrefixCache, max_blocks_per_sequence
from engine.kv_cache.prefix_leases import LeaseEvent, PrefixLeases
from engine.protocol import (
    MAX_NAMED,
    Breakpoint,
    EngineOutput,
    EngineRequest,
    FinishReason,
    Lane,
    LaneStatus,
)
from engine.scheduling.lanes import LaneLimits
from engine.scheduling.pace import Pace
from engine.scheduling.planner import Planner
from engine.scheduling.prefix_loader import PrefixLoader
from engine.scheduling.queues import Deadlines
from engine.scheduling.step_plan import (
    NOTHING,
    Embedded,
    Sampled,
    ScheduledSequence,
    SchedulerOutput,
    Scored,
    check_computed,
)
from engine.scheduling.validation import check_request
from engine.sequence import (
    Constraint,
    KeptTokens,
    Key,
    RequestState,
    SampledTokens,
    Sequence,
    SequenceStatus,
    sequences_of,
)

MAX_TRIALS = 3
"""How often in a row a sequence is computed alone because a step with others failed. Where each
passes alone and they fail together once more, it is their number that does it."""


class Scheduler:
    """`cache` says how many blocks there are, how large, and which sliding window applies. `clock`
    returns monotonic seconds; `seed` starts the draws for requests that name no seed."""

    def __init__(
        self,
        *,
        cache: PrefixCache,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_waiting: Mapping[Lane, int],
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        clock: Callable[[], float] = time.monotonic,
        seed: int = 0,
        pace: Pace | None = None,
        max_steps_in_flight: int = 1,
        penalties_ahead: bool = False,
        whole_prompts: bool = False,
        pooling: Pooling = "last",
        lane_limits: Mapping[Lane, LaneLimits] | None = None,
        share: FairShare | None = None,
        loader: PrefixLoader | None = None,
        holds: BlockHolds | None = None,
    ) -> None:
        """pace: bounds the prompt tokens of steps that also decode. max_steps_in_flight: how many
        outputs of schedule() may wait for their update(). penalties_ahead: a pending token can be
        penalised. whole_prompts: each fits one step. max_waiting: requests queued in each lane.
        pooling: of embeddings. None, of any: there is no such thing here."""
        assert max_num_batched_tokens >= 1 and max_num_seqs >= 1 and min(max_waiting.values()) >= 1
        assert max_model_len >= 2, f"max_model_len {max_model_len}: a prompt and an answer"
        self.cache = cache
        self.max_num_batched_tokens, self.max_num_seqs = max_num_batched_tokens, max_num_seqs
        self.max_model_len, self.vocab_size = max_model_len, vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_blocks_per_seq = max_blocks_per_sequence(
            max_model_len,
            block_size=cache.block_size,
            sliding_window=cache.sliding_window,
            max_num_batched_tokens=max_num_batched_tokens,
            max_steps_in_flight=max_steps_in_flight,
        )
        num, most = cache.pool.num_blocks, self.max_blocks_per_seq
        assert num >= most, f"{num} blocks cannot hold a sequence that takes {most}"
        self.prefix_cache_query_tokens = self.prefix_cache_hit_tokens = 0
        self.pace, self._pooling = pace or Pace(None), pooling
        self._clock, self._updated_s = clock, 0.0
        self._random, self._loader, self._holds = random.Random(seed), loader, holds
        self._num_arrived = self._num_paused = 0
        self._requests: dict[str, RequestState] = {}
        self._deadlines = Deadlines(self._waits_until)
        self._keeping = PrefixLeases(cache.leases, cache.block_size)
        self._prompts = PromptMemory(cache.block_size)
        self._planner = Planner(
            cache=cache,
            pace=self.pace,
            share=share or FairShare(),
            limits=lane_limits or {},
            max_waiting=max_waiting,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_blocks_per_seq=self.max_blocks_per_seq,
            penalties_ahead=penalties_ahead,
            whole_prompts=whole_prompts,
            on_start=self._started,
            loader=loader,
        )
        self._share, self._lanes = self._planner.share, self._planner.lanes
        self._running, self._waiting = self._planner.running, self._planner.waiting
        """A choice that waits for its request's choice 0 is in neither, as what is paused and holds
        no blocks."""
        self._on_trial: dict[Key, Sequence] = {}
        """Sequences of steps that failed: each has steps of its own until it says something."""

    # What goes in

    def add(self, request: EngineRequest, constraint: Constraint | None = None) -> None:
        """Queue a request. InvalidRequest (naming `param`) or ContextLengthExceeded when it can
        never run, EngineOverloaded when its lane's queue is full; nothing is kept then."""
        check_request(request, vocab_size=self.vocab_size, max_model_len=self.max_model_len)
        if request.request_id in self._requests:
            raise InvalidRequest("request_id is in use by a running request", param="request_id")
        self._lanes.refuse_what_has_no_place(request.lane, request.tenant)
        sequences = sequences_of(
            request,
            arrival=self._num_arrived,
            seed=self._seed_of(request),
            max_model_len=self.max_model_len,
            pooling=self._pooling,
            constraint=constraint,
        )
        state = RequestState(request.request_id, sequences, self._clock(), request.n)
        state.breakpoints = request.breakpoints
        state.log_id = request.log_id or request.request_id
        self._requests[request.request_id] = state
        self._num_arrived += 1
        self._lanes.queues[request.lane].take(request.tenant)
        self._lanes.num_open[request.lane] += state.num_unfinished
        for _ in range(state.num_unfinished):
            self._share.enter(request.lane, request.tenant)
        # The other choices find the prompt in the cache when its first has computed it (`update`).
        for prompt in state.prompts:
            for seq in prompt.choices[:1] if self.cache.enabled else prompt.choices:
                self._waiting.add(seq)
        if request.fetch is not None and self._loader is not None:
            for seq in state.prompts[0].choices[:1]:
                self._loader.expect(seq, request.fetch)
        if request.deadline_s is not None:
            state.deadline_s = state.arrival_s + request.deadline_s
            self._deadlines.add(state.deadline_s, request.request_id, self.num_queued)

    def abort(self, request_id: str) -> list[EngineOutput]:
        """End a request and free its blocks now. A last output for each open choice, all with the
        final usage; none when the id is unknown or finished."""
        state = self._requests.get(request_id)
        return [] if state is None else self._end(state, "abort", None)

    def take_back(self, request_id: str) -> bool:
        """End a request none of whose choices ever ran, unbilled, and tell whether it was one."""
        state = self._requests.get(request_id)
        if state is None or state.first_scheduled_s is not None:
            return False
        self.abort(request_id)
        return True

    def pause(self, request_id: str) -> None:
        """From the next step on it takes none; its blocks are whose needs them. Ignored when it is
        paused, unknown or finished."""
        state = self._requests.get(request_id)
        if state is None or state.is_paused:
            return
        state.is_paused = True
        self._num_paused += 1
        for seq in state.sequences:
            if seq.status is SequenceStatus.RUNNING:
                self._running.halt(seq)
                seq.draft_token_ids = []
            else:
                self._waiting.remove(seq)

    def resume(self, request_id: str) -> None:
        """Ignored unless it is paused."""
        state = self._requests.get(request_id)
        if state is None or not state.is_paused:
            return
        state.is_paused = False
        self._num_paused -= 1
        for seq in state.sequences:
            if seq.status is SequenceStatus.RUNNING:
                self._running.go_on(seq)
            elif seq.status is SequenceStatus.WAITING and not self._is_parked(seq):
                self._waiting.add(seq)

    def expire(self) -> list[str]:
        """End the requests of which nothing ran before their deadline, unbilled; their ids. End the
        leases whose time is over, and begin and end holds of other engines."""
        self.cache.expire_leases()
        if self._holds is not None:
            self._holds.advance()
        expired = self._deadlines.passed(self._clock())
        for request_id in expired:
            self.abort(request_id)
        return expired

    def take_lease_events(self) -> list[LeaseEvent]:
        """Return what of prompts is kept, or no longer, since the last call."""
        return self._keeping.take_events()

    # The step

    def schedule(self) -> SchedulerOutput:
        """Decide the next step and give it its blocks. Each output must be handed, in order, to
        update() or fail_batch(). Empty when nothing is unfinished, or when all that is waits for
        steps in flight."""
        if self._loader is not None:
            self._advance(self._loader)
        step = self._planner.plan(self._next_on_trial() if self._on_trial else None)
        for entry in step.scheduled.values():
            entry.seq.num_in_flight += entry.num_new_tokens
            entry.seq.num_pending += entry.samples
            entry.seq.draft_token_ids = []
        entries = list(step.scheduled.values())
        started_s = self._clock() if step.pressed else 0.0
        for seq in step.preempted if self._on_trial else ():
            if seq.key in self._on_trial:
                self._waiting.remove(seq)
        return SchedulerOutput(entries, step.preempted, step.num_tokens, started_s, step.pressed)

    def update(
        self,
        output: SchedulerOutput,
        sampled: Sampled,
        embedded: Embedded = NOTHING,
        scored: Scored = NOTHING,
    ) -> list[EngineOutput]:
        """Take in what the step computed: `sampled` has exactly the entries that sample, `embedded`
        those that embed, and there is an output for each of them; `scored` those that tell of
        prompts. Sequences that ended or were preempted since schedule() are passed over."""
        check_computed(output, sampled, embedded, scored)
        now = self._clock()
        step_s = now - max(output.started_s, self._updated_s)
        if output.prompt_tokens and step_s > 0:
            self._lanes.observe(output.prompt_tokens, step_s)
        self._updated_s = now
        outputs: list[EngineOutput] = []
        for entry in output.scheduled:
            seq = entry.seq
            if not entry.stands():
                continue
            seq.num_in_flight -= entry.num_new_tokens
            seq.num_pending -= entry.samples
            tokens = sampled[seq.key] if entry.samples else []
            if entry.num_scored:
                seq.score(entry.start, scored[seq.key])
            num_rejected = len(entry.draft_token_ids) + entry.samples - len(tokens)
            said, reason = seq.say(tokens, self.eos_token_ids)
            computed = entry.start + entry.num_new_tokens - num_rejected
            seq.num_computed_tokens = min(computed, seq.num_tokens)
            self.cache.register(seq)
            if self._loader is not None:
                self._loader.computed(seq)
            if self._keeping.promised and seq.index == 0:
                self._keeping.computed(seq.request_id, seq.block_table, seq.num_registered_blocks)
            self.cache.slide(seq)
            if seq.num_trials:
                self._judge(entry, is_alone=len(output.scheduled) == 1)
            if entry.embeds:
                outputs.append(self._answer(seq, said, "stop", now, embedded[seq.key]))
            elif entry.samples:
                outputs.append(self._answer(seq, said, reason, now, None))
        return outputs

    def fail_batch(
        self, output: SchedulerOutput, error_code: str = EngineStepFailed.code
    ) -> list[EngineOutput]:
        """The step raised: end every request in it. What it computed is not trusted, so nothing
        of it enters the prefix cache. A last output for each of their open choices."""
        return [
            last
            for entry in output.scheduled
            if entry.stands()  # not ended with an earlier choice of the same request
            for last in self._end(self._requests[entry.key[0]], "error", error_code)
        ]

    def try_alone(self, output: SchedulerOutput) -> list[EngineOutput]:
        """The step raised, and any of its requests may be the cause: each of its sequences is
        computed anew, alone, until it says something. Those that are the cause will fail alone.
        What the step computed is not trusted. A last output for each open choice of a request that
        ends here, as it has been through that too often."""
        ended: list[EngineOutput] = []
        for entry in output.scheduled:
            seq = entry.seq
            if not entry.stands():
                continue
            if seq.num_trials == MAX_TRIALS:
                state = self._requests[seq.request_id]
                ended += self._end(state, "error", EngineStepFailed.code)
                continue
            seq.num_trials += 1
            self._on_trial[seq.key] = seq
            self._planner.set_aside(seq)
        return ended

    def log_ids(self, entries: Iterable[ScheduledSequence]) -> str:
        """Return what a line of the log calls the requests of a step, `MAX_NAMED` of them."""
        ids = dict.fromkeys(
            self._requests[each.key[0]].log_id for each in entries if each.key[0] in self._requests
        )
        return ", ".join(islice(ids, MAX_NAMED))

    # What there is

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def has_work(self) -> bool:
        """Whether anything that is unfinished is not paused, or waits to be copied to a tier."""
        if self._loader is not None and self._loader.has_writes:
            return True
        return len(self._requests) > self._num_paused

    def wait(self) -> None:
        """Wait for a tier, for a short time, after `schedule` had nothing to schedule."""
        if self._loader is not None:
            self._loader.wait()

    @property
    def running(self) -> list[Sequence]:
        """Sequences that take steps, by precedence; not to be changed."""
        return self._running.active

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that do not: queued, preempted, or waiting for their request's choice 0."""
        return sum(self._lanes.num_open.values()) - len(self._running)

    @property
    def num_queued(self) -> int:
        """Requests none of whose choices ever ran."""
        return sum(queue.num_taken for queue in self._lanes.queues.values())

    @property
    def num_preemptions(self) -> int:
        return self._planner.num_preemptions

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self.cache.num_available

    @property
    def num_context_tokens(self) -> int:
        """Tokens of the sequences that decode; O(running)."""
        return sum(seq.num_tokens for seq in self._running.active if seq.num_missing <= 1)

    @property
    def kv_cache_usage(self) -> float:
        """Blocks held by sequences over all blocks, 0..1."""
        return 1.0 - self.cache.num_available / self.cache.pool.num_blocks

    def lanes(self) -> dict[Lane, LaneStatus]:
        """As of now; O(running)."""
        num_running = Counter(seq.lane for seq in self._running)
        tokens, pairs = dict(self._waiting.num_tokens), dict(self._waiting.num_pairs)
        for seq in self._running.active:
            if (missing := seq.num_missing) > 1:
                tokens[seq.lane] += missing
                pairs[seq.lane] += missing * (seq.num_tokens - missing / 2)
        return {
            lane: LaneStatus(
                num_running=num_running[lane],
                num_waiting=self._lanes.num_open[lane] - num_running[lane],
                waiting_tokens=tokens[lane],
                waiting_pairs=pairs[lane],
                prefill_tokens_per_s=self._lanes.tokens_per_s[lane],
                num_queued=self._lanes.queues[lane].num_taken,
                max_queued=self._lanes.queues[lane].most,
            )
            for lane in LANE_WEIGHTS
        }

    def check_integrity(self) -> None:
        """AssertionError unless queues, requests and blocks tell one story. For tests and idle
        moments: O(blocks + tokens)."""
        open_sequences = []
        for state in self._requests.values():
            unfinished = [s for s in state.sequences if s.status is not SequenceStatus.FINISHED]
            assert len(unfinished) == state.num_unfinished > 0, f"{state.request_id}: miscounted"
            open_sequences += unfinished
        running = [s for s in open_sequences if s.status is SequenceStatus.RUNNING]
        idle = [s for s in open_sequences if s.status is not SequenceStatus.RUNNING]
        self._running.check_integrity(
            [s for s in running if not self._requests[s.request_id].is_paused],
            [s for s in running if self._requests[s.request_id].is_paused],
        )
        self._waiting.check_integrity([s for s in idle if self._may_wait(s)])
        assert len(running) <= self.max_num_seqs
        assert self._num_paused == sum(state.is_paused for state in self._requests.values())
        for lane, num_open in self._lanes.num_open.items():
            assert num_open == sum(s.lane == lane for s in open_sequences), f"{lane}: miscounted"
        states = self._requests.values()
        queued = [state.sequences[0] for state in states if state.first_scheduled_s is None]
        for lane, queue in self._lanes.queues.items():
            queue.check_integrity([seq.tenant for seq in queued if seq.lane == lane])
        for seq in idle:
            assert not seq.block_table and seq.num_computed_tokens == 0, "waiting with blocks"
        for seq in running:
            assert seq.num_held_blocks <= self.max_blocks_per_seq, "more than the window needs"
            assert seq.num_computed_tokens < seq.num_tokens <= self.max_model_len
            covered = len(seq.block_table) * self.cache.block_size
            assert seq.num_computed_tokens + seq.num_in_flight <= covered, "computed off the table"
        loading = () if self._loader is None else self._loader.held_tables()
        held = () if self._holds is None else self._holds.tables()
        self.cache.check_integrity(running, chain(loading, held))
        self._keeping.check_integrity()

    # How

    def _seed_of(self, request: EngineRequest) -> int:
        for seed in (request.sampling.seed, request.drawn_seed):
            if seed is not None:
                return seed
        return self._random.getrandbits(64)

    def _judge(self, entry: ScheduledSequence, *, is_alone: bool) -> None:
        """Take in that a step with a sequence that was on trial has passed."""
        if not is_alone:
            entry.seq.num_trials = 0
        elif entry.key in self._on_trial and (entry.samples or entry.embeds):
            del self._on_trial[entry.key]

    def _next_on_trial(self) -> Sequence | None:
        """Return one that is not paused; one that has begun its trial goes first."""
        found = None
        for seq in self._on_trial.values():
            if self._requests[seq.request_id].is_paused:
                continue
            if seq.status is SequenceStatus.RUNNING:
                return seq
            found = found or seq
        return found

    def _advance(self, loader: PrefixLoader) -> None:
        """Take in what tiers brought, and give them what they are to keep."""
        for seq in loader.advance(self._planner.num_spare):
            if self._may_wait(seq):
                self._waiting.add(seq)
        loader.write()

    def _started(self, seq: Sequence) -> None:
        state = self._requests[seq.request_id]
        prompt = state.prompt_of(seq)
        if prompt.cached_tokens is not None:
            return
        assert seq.num_cached_tokens is not None, "it was looked up"
        state.schedule_prompt(prompt, seq.num_cached_tokens)
        if self.cache.serves(seq):
            self.prefix_cache_query_tokens += seq.num_prompt_tokens
            self.prefix_cache_hit_tokens += seq.num_cached_tokens
            digests = self.cache.prompt_digests(seq)
            prompt.seen = self._prompts.meet(seq.prompt_token_ids, digests, seq.num_cached_tokens)
            if self._loader is not None:
                num_seen = 0 if prompt.seen is None else prompt.seen.tokens
                brought = self._loader.started(seq, seq.num_cached_tokens, num_seen)
                state.load_prompt(prompt, brought["host"] + brought["disk"], brought["peer"])
        if state.first_scheduled_s is None:
            state.first_scheduled_s = self._clock()
            self._lanes.queues[seq.lane].give_back(seq.tenant)
            if state.breakpoints:
                state.kept = self._keep(seq, state.breakpoints)
                if self._loader is not None:
                    kept = state.kept.kept_tokens + sum(state.kept.written_tokens)
                    self._loader.keep(seq, kept)

    def _keep(self, seq: Sequence, breakpoints: tuple[Breakpoint, ...]) -> KeptTokens:
        """Keep nothing of a sliding window, whose beginning is given back while it is computed:
        nothing is kept.
        """
        if not self.cache.serves(seq) or self.cache.sliding_window is not None:
            return KeptTokens(written_tokens=(0,) * len(breakpoints))
        return self._keeping.begin(seq.request_id, seq.tenant, seq.block_table, breakpoints)

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
        is_first = seq.num_output_tokens == seq.num_said + len(said)
        if is_first:
            state.resumed_tokens += seq.num_said
        self._share.charge(seq.lane, seq.tenant, seq.weight, OUTPUT_COST * len(said))
        prompt = state.prompt_of(seq)
        if not prompt.is_prefilled:
            state.prefill_prompt(prompt, now)
            if self.cache.enabled and not state.is_paused:
                for sibling in prompt.choices[1:]:
                    self._waiting.add(sibling)
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
            prompt_logprobs=seq.prompt_logprobs if seq.scores and is_first else None,
        )

    def _finish(self, state: RequestState, seq: Sequence, reason: FinishReason) -> None:
        """End one choice, wherever it is, and free its blocks."""
        if seq.status is SequenceStatus.RUNNING:
            self._running.remove(seq)
            self._planner.release(seq)
        else:
            self._waiting.remove(seq)
        self._on_trial.pop(seq.key, None)
        seq.finish(reason)
        if self._loader is not None:
            self._loader.forget(seq)
        self._share.leave(seq.lane, seq.tenant)
        self._lanes.num_open[seq.lane] -= 1
        state.num_unfinished -= 1
        if state.num_unfinished == 0:
            if state.first_scheduled_s is None:
                self._lanes.queues[seq.lane].give_back(seq.tenant)
            self._num_paused -= state.is_paused
            self._keeping.forget(state.request_id)
            del self._requests[state.request_id]

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

    def _waits_until(self, request_id: str, deadline_s: float) -> bool:
        state = self._requests.get(request_id)
        return (
            state is not None
            and state.first_scheduled_s is None
            and (state.deadline_s == deadline_s)
        )

    def _may_wait(self, seq: Sequence) -> bool:
        """Whether an open sequence without blocks is among those that may start."""
        return not self._requests[seq.request_id].is_paused and not self._is_parked(seq)

    def _is_parked(self, seq: Sequence) -> bool:
        """Whether the choice waits for the first one of its prompt to compute that, for a tier, or
        for a step of its own."""
        if seq.key in self._on_trial:
            return True
        if self._loader is not None and self._loader.is_loading(seq):
            return True
        prompt = self._requests[seq.request_id].prompt_of(seq)
        return self.cache.enabled and seq is not prompt.choices[0] and not prompt.is_prefilled
